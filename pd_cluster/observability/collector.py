"""The whole cluster's metrics, made from snapshots at scrape time: nothing is counted on the way
of a token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pd_cluster.observability.hit_rate import HitRate
from pd_cluster.observability.ledger import Ledger
from pd_cluster.observability.metrics import (
    FAMILIES,
    HIT_RATE,
    HITS,
    QUERIES,
    RETRACTED,
    RUNNING,
    STAGES,
    WAITING,
)
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    GatewaySnapshot,
    HistogramSnapshot,
    SampleKey,
    WorkerSnapshot,
)
from pd_cluster.types import RetractionPolicy, WorkerId

_PER_WORKER = ["role", "worker"]
_TOKEN_STATES = {
    "free": "free",
    "private": "private",
    "protected": "protected",
    "evictable": "evictable",
    "inflight": "in_flight",
}
# Metric name, text, field of WorkerSnapshot. Counter families leave `_total` to the client library.
_WORKER_GAUGES = (
    ("pd_num_transfers_inflight", "Attempts whose pages are moving.", "transfers_in_flight"),
    (
        "pd_prefix_index_lag_seconds",
        "Age of the oldest change of the cache that the coordinator has not confirmed.",
        "index_lag_s",
    ),
)
_WORKER_COUNTERS = (
    (*QUERIES, "cache_queries"),
    (*HITS, "cache_hits"),
    ("pd_evicted_tokens", "Tokens evicted from the prefix cache.", "evicted"),
    ("pd_kv_transfer_bytes", "KV bytes written to peers.", "transfer_bytes"),
    (
        "pd_kv_transfer_avoided_bytes",
        "KV bytes not sent because the peer held them.",
        "transfer_avoided_bytes",
    ),
    ("pd_kv_transfer_descriptors", "Descriptors of transfers.", "transfer_descriptors"),
    ("pd_retracted_tokens", "Tokens whose KV was given up by retractions.", "retracted_tokens"),
    (
        "pd_tier_skipped_tokens",
        "Tokens that were not copied to a lower tier for want of room.",
        "tier_skipped_tokens",
    ),
    ("pd_tier_errors", "Operations of lower tiers that failed.", "tier_errors"),
)
# The values that a label always has, so that a rate has a first zero.
_WORKER_LABELLED = (
    (
        "pd_kv_transfer_failures",
        "Transfers that failed.",
        "reason",
        "transfer_failures",
        ("peer lost",),
    ),
    (
        "pd_retractions",
        "Sequences taken back under memory pressure.",
        "policy",
        "retractions",
        (*get_args(RetractionPolicy), "preemption", "scale_in"),
    ),
    (
        "pd_tier_loaded_tokens",
        "Tokens brought up from a lower tier.",
        "tier",
        "tier_loaded_tokens",
        (),
    ),
    (
        "pd_tier_loaded_bytes",
        "KV bytes brought up from a lower tier.",
        "tier",
        "tier_loaded_bytes",
        (),
    ),
    (
        "pd_tier_stored_tokens",
        "Tokens written to a lower tier.",
        "tier",
        "tier_stored_tokens",
        (),
    ),
    (
        "pd_tier_stored_bytes",
        "KV bytes written to a lower tier.",
        "tier",
        "tier_stored_bytes",
        (),
    ),
)
_WORKER_HISTOGRAMS = (
    ("pd_kv_transfer_seconds", "Time of a transfer.", "transfer_seconds"),
    ("pd_eviction_seconds", "Time of an eviction.", "eviction_seconds"),
)
_COORDINATOR_COUNTERS = (
    (
        "pd_placements",
        "Attempts placed.",
        "route",
        "placements",
        ("remote", "remote+pull", "local"),
    ),
    (
        "pd_admission_rejected",
        "Attempts rejected.",
        "reason",
        "rejections",
        (
            *("no_workers", "never_fits", "queue_full", "tenant_queue_full"),
            *("queue_timeout", "deadline"),
        ),
    ),
    (
        "pd_attempts",
        "Attempts that ended.",
        "outcome",
        "attempts",
        ("finished", "aborted", "refused", "retracted", "failed"),
    ),
)


class ClusterCollector(Collector):
    """`ask` gives the cluster's snapshot of now; the ledgers also know what earlier ones gave.

    A worker of which nothing was heard for `lost_after_s` seconds is counted as lost.
    """

    def __init__(
        self,
        ask: Callable[[], ClusterSnapshot],
        workers: Ledger[WorkerSnapshot],
        gateways: Ledger[GatewaySnapshot],
        *,
        model: str,
        lost_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._workers = workers
        self._gateways = gateways
        self._model = model
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._hit_rates: dict[WorkerId, HitRate] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Nothing: the registry would ask the cluster at registration otherwise."""
        return []

    def collect(self) -> list[Metric]:
        snapshot = self._ask()
        # Two who scrape at once must not get in each other's way.
        with self._lock:
            for worker in snapshot.workers:
                self._workers.observe(worker)
            for gateway in snapshot.gateways:
                self._gateways.observe(gateway)
            coordinator = snapshot.coordinator or CoordinatorSnapshot()
            return [
                *self._load(snapshot, coordinator),
                *self._states(snapshot, coordinator),
                *self._caches(snapshot.workers),
                *_worker_counters(self._workers.totals()),
                *_coordinator(coordinator),
                *self._requests(),
            ]

    def _load(
        self, snapshot: ClusterSnapshot, coordinator: CoordinatorSnapshot
    ) -> Iterator[Metric]:
        running = GaugeMetricFamily(*RUNNING, labels=_PER_WORKER)
        waiting = GaugeMetricFamily(*WAITING, labels=_PER_WORKER)
        retracted = GaugeMetricFamily(*RETRACTED, labels=_PER_WORKER)
        running.add_metric(["coordinator", "coordinator"], coordinator.running)
        waiting.add_metric(["coordinator", "coordinator"], coordinator.waiting)
        for gateway in snapshot.gateways:
            labels = ["gateway", gateway.worker.name]
            running.add_metric(labels, gateway.running)
            waiting.add_metric(labels, gateway.waiting)
            retracted.add_metric(labels, gateway.retracted)
        for each in snapshot.workers:
            labels = [each.role, each.worker.name]
            running.add_metric(labels, each.running)
            waiting.add_metric(labels, each.waiting)
        yield from (running, waiting, retracted)

    def _states(
        self, snapshot: ClusterSnapshot, coordinator: CoordinatorSnapshot
    ) -> Iterator[Metric]:
        counts = {
            (role, state): 0
            for role in ("prefill", "decode", "gateway")
            for state in ("ready", "lost")
        }
        for each in (*coordinator.workers, *coordinator.lost):
            state = "lost" if each.silent_s >= self._lost_after_s else each.state
            counts[each.role, state] = counts.get((each.role, state), 0) + 1
        counts["gateway", "ready"] = len(snapshot.gateways)
        counts["gateway", "lost"] = snapshot.silent_gateways
        states = GaugeMetricFamily(
            "pd_workers", "Processes by what the coordinator knows.", labels=["role", "state"]
        )
        for (role, state), count in counts.items():
            states.add_metric([role, state], count)
        yield states

    def _caches(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        """Gauges: of those workers only that have answered."""
        now = self._clock()
        self._hit_rates = {
            each.worker: self._hit_rates.get(each.worker, HitRate()) for each in workers
        }
        tokens = GaugeMetricFamily(
            "pd_kv_tokens", "Tokens of the KV pool by state.", labels=[*_PER_WORKER, "state"]
        )
        host = GaugeMetricFamily(
            "pd_tier_tokens",
            "Tokens of the host tier by state.",
            labels=[*_PER_WORKER, "tier", "state"],
        )
        hit_rate = GaugeMetricFamily(*HIT_RATE, labels=_PER_WORKER)
        for each in workers:
            labels = [each.role, each.worker.name]
            for state, attribute in _TOKEN_STATES.items():
                tokens.add_metric([*labels, state], getattr(each, attribute))
            for state, count in each.host_tokens.items():
                host.add_metric([*labels, "host", state], count)
            rate = self._hit_rates[each.worker]
            rate.observe(now, each.cache_queries, each.cache_hits)
            hit_rate.add_metric(labels, rate.rate)
        yield from (tokens, host, hit_rate)
        for name, text, attribute in _WORKER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_PER_WORKER)
            for each in workers:
                gauge.add_metric([each.role, each.worker.name], getattr(each, attribute))
            yield gauge

    def _requests(self) -> Iterator[Metric]:
        """What the gateways count, added up; and the stages that only workers see."""
        families: dict[str, dict[SampleKey, float]] = {name: {} for name in FAMILIES}
        for gateway in self._gateways.totals():
            for name, samples in gateway.samples.items():
                _add(families[name], samples)
        for worker in self._workers.totals():
            for stage, histogram in worker.stage_seconds.items():
                family = HistogramMetricFamily(*STAGES, labels=["model", "stage"])
                family.add_metric([self._model, stage], *_cumulative(histogram))
                samples = {
                    (each.name, tuple(sorted(each.labels.items()))): each.value
                    for each in family.samples
                }
                _add(families[STAGES[0]], samples)
        for name, (kind, text) in FAMILIES.items():
            metric = Metric(name, text, kind)
            for (sample, labels), value in families[name].items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


def _worker_counters(workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
    for name, text, attribute in _WORKER_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_PER_WORKER)
        for each in workers:
            counter.add_metric([each.role, each.worker.name], getattr(each, attribute))
        yield counter
    for name, text, label, attribute, always in _WORKER_LABELLED:
        counter = CounterMetricFamily(name, text, labels=[*_PER_WORKER, label])
        for each in workers:
            counts = dict.fromkeys(always, 0) | getattr(each, attribute)
            for value, count in counts.items():
                counter.add_metric([each.role, each.worker.name, value], count)
        yield counter
    for name, text, attribute in _WORKER_HISTOGRAMS:
        histogram = HistogramMetricFamily(name, text, labels=_PER_WORKER)
        for each in workers:
            labels = [each.role, each.worker.name]
            histogram.add_metric(labels, *_cumulative(getattr(each, attribute)))
        yield histogram


def _coordinator(coordinator: CoordinatorSnapshot) -> Iterator[Metric]:
    for name, text, label, attribute, always in _COORDINATOR_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=[label])
        counts = dict.fromkeys(always, 0) | getattr(coordinator, attribute)
        for value, count in counts.items():
            counter.add_metric([value], count)
        yield counter
    expired = CounterMetricFamily(
        "pd_leases_expired", "Placements that no report of a worker confirmed in time."
    )
    expired.add_metric([], coordinator.leases_expired)
    yield expired


def _cumulative(histogram: HistogramSnapshot) -> tuple[list[tuple[str, float]], float]:
    """Prometheus' buckets, each with all observations at most its bound, and the sum of values."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
        below += count
        buckets.append((str(bound), below))
    return buckets, histogram.total


def _add(totals: dict[SampleKey, float], samples: dict[SampleKey, float]) -> None:
    for key, value in samples.items():
        totals[key] = totals.get(key, 0.0) + value
