"""What a process tells about itself when asked: plain gauges and counters, taken from its state.

Counters count since the process started and never go down. Lengths are tokens, sizes bytes, times
seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from pd_cluster.types import Role, WorkerId


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before.

    The last count is above all bounds.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


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
    """A worker. `free` + `private` + `in_flight` + `protected` + `evictable` = `capacity`."""

    worker: WorkerId
    role: Role
    capacity: int
    # Gauges.
    free: int
    private: int = 0
    in_flight: int = 0
    protected: int = 0
    evictable: int = 0
    running: int = 0
    waiting: int = 0
    retracted: int = 0
    transfers_in_flight: int = 0
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


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the coordinator sees it; `state` e.g. "ready", "refused", "lost"."""

    worker: WorkerId
    role: Role
    state: str
    host: str = ""


class CoordinatorSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator; the dicts are counters by label value.

    `waiting` requests have no placement yet.
    """

    workers: tuple[WorkerStatus, ...] = ()
    waiting: int = 0
    running: int = 0
    placements: dict[str, int] = {}
    rejections: dict[str, int] = {}
    attempts: dict[str, int] = {}


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Those that answered in time."""

    coordinator: CoordinatorSnapshot | None = None
    workers: tuple[WorkerSnapshot, ...] = ()
