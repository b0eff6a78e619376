"""What a process tells about itself when asked: plain gauges and counters, taken from its state.

Counters count since the process started and never go down. Lengths are tokens, sizes bytes, times
seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import structs

from pd_cluster.types import Role, WorkerId

# Bounds of the times of requests, and of their stages wherever these are measured.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Bounds of the times of what a worker does within a step or beside it.
WORK_BUCKETS = (1e-5, 1e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before.

    The last count is above all bounds.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    def __add__(self, other: HistogramSnapshot) -> HistogramSnapshot:
        """All observations of both; one that has none may have no bounds either."""
        if not sum(other.counts):
            return self
        if not sum(self.counts):
            return other
        assert self.bounds == other.bounds, "histograms of one name with different bounds"
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total + other.total)


class Histogram:
    """Counts observations into buckets; `snapshot` is what is sent."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(sorted(bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker. `free` + `private` + `in_flight` + `protected` + `evictable` = `capacity`.

    `number` counts the snapshots of this life. `host_tokens` are those of the host tier by state,
    empty where there is none.
    """

    worker: WorkerId
    role: Role
    capacity: int
    number: int = 0
    # Gauges.
    free: int
    private: int = 0
    in_flight: int = 0
    protected: int = 0
    evictable: int = 0
    running: int = 0
    waiting: int = 0
    transfers_in_flight: int = 0
    index_lag_s: float = 0.0
    host_tokens: dict[str, int] = {}
    # Counters. Queries and hits are tokens of prompts that were looked up, each prompt once.
    cache_queries: int = 0
    cache_hits: int = 0
    evicted: int = 0
    transfer_bytes: int = 0
    transfer_avoided_bytes: int = 0
    transfer_descriptors: int = 0
    transfer_failures: dict[str, int] = {}
    retractions: dict[str, int] = {}
    retracted_tokens: int = 0
    transfer_seconds: HistogramSnapshot = HistogramSnapshot()
    eviction_seconds: HistogramSnapshot = HistogramSnapshot()
    stage_seconds: dict[str, HistogramSnapshot] = {}
    # By tier, "host" or "disk": what came up from it, and what was written to it.
    tier_loaded_tokens: dict[str, int] = {}
    tier_loaded_bytes: dict[str, int] = {}
    tier_stored_tokens: dict[str, int] = {}
    tier_stored_bytes: dict[str, int] = {}
    tier_skipped_tokens: int = 0
    tier_errors: int = 0

    COUNTERS: ClassVar[tuple[str, ...]] = (
        *("cache_queries", "cache_hits", "evicted"),
        *("transfer_bytes", "transfer_avoided_bytes", "transfer_descriptors", "transfer_failures"),
        *("retractions", "retracted_tokens"),
        *("transfer_seconds", "eviction_seconds", "stage_seconds"),
        *("tier_loaded_tokens", "tier_loaded_bytes", "tier_stored_tokens", "tier_stored_bytes"),
        *("tier_skipped_tokens", "tier_errors"),
    )


# A sample's name and its labels, sorted.
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class GatewaySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway. `samples` are those of its counters and histograms, by family."""

    worker: WorkerId
    number: int = 0
    running: int = 0
    waiting: int = 0
    retracted: int = 0
    samples: dict[str, dict[SampleKey, float]] = {}

    COUNTERS: ClassVar[tuple[str, ...]] = ("samples",)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the coordinator sees it; `state` e.g. "ready", "draining", "lost".

    `silent_s`: since its last report.
    """

    worker: WorkerId
    role: Role
    state: str
    host: str = ""
    silent_s: float = 0.0


class CoordinatorSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator; the dicts are counters by label value.

    `waiting` requests have no placement yet. `lost` are workers that were here, and went unasked.
    `metrics_url` is where the whole cluster's metrics are, None where nowhere.
    """

    workers: tuple[WorkerStatus, ...] = ()
    lost: tuple[WorkerStatus, ...] = ()
    waiting: int = 0
    running: int = 0
    placements: dict[str, int] = {}
    rejections: dict[str, int] = {}
    attempts: dict[str, int] = {}
    leases_expired: int = 0
    metrics_url: str | None = None


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Those that answered in time, and how many gateways did not."""

    coordinator: CoordinatorSnapshot | None = None
    workers: tuple[WorkerSnapshot, ...] = ()
    gateways: tuple[GatewaySnapshot, ...] = ()
    silent_gateways: int = 0


S = TypeVar("S", WorkerSnapshot, GatewaySnapshot)


def with_counters_of(earlier: S, later: S) -> S:
    """`later`, its counters going on from where those of `earlier` ended."""
    totals = {name: _sum(getattr(earlier, name), getattr(later, name)) for name in later.COUNTERS}
    return structs.replace(later, **totals)


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {
            key: _sum(a[key], b[key]) if key in a and key in b else {**a, **b}[key]
            for key in {**a, **b}
        }
    return a + b
