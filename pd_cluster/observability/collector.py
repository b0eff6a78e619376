"""Metrics read from snapshots at scrape time; nothing is counted on the way of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pd_cluster.observability.hit_rate import HitRate
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    HistogramSnapshot,
    WorkerSnapshot,
)
from pd_cluster.types import WorkerId

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
    ("pd_num_requests_retracted", "Sequences that were retracted and wait.", "retracted"),
    ("pd_num_transfers_inflight", "Attempts whose pages are moving.", "transfers_in_flight"),
)
_WORKER_COUNTERS = (
    ("pd_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "cache_queries"),
    ("pd_prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cache_hits"),
    ("pd_evicted_tokens", "Tokens evicted from the prefix cache.", "evicted"),
    ("pd_kv_transfer_bytes", "KV bytes written to peers.", "transfer_bytes"),
    (
        "pd_kv_transfer_avoided_bytes",
        "KV bytes not sent because the peer held them.",
        "transfer_avoided_bytes",
    ),
    ("pd_kv_transfer_descriptors", "Descriptors of transfers.", "transfer_descriptors"),
    ("pd_retracted_tokens", "Tokens whose KV was given up by retractions.", "retracted_tokens"),
)
_WORKER_LABELLED = (
    ("pd_kv_transfer_failures", "Transfers that failed.", "reason", "transfer_failures"),
    ("pd_retractions", "Sequences taken back under memory pressure.", "policy", "retractions"),
)
_WORKER_HISTOGRAMS = (
    ("pd_kv_transfer_seconds", "Time of a transfer.", "transfer_seconds"),
    ("pd_eviction_seconds", "Time of an eviction.", "eviction_seconds"),
)
_COORDINATOR_COUNTERS = (
    ("pd_placements", "Attempts placed.", "route", "placements"),
    ("pd_admission_rejected", "Attempts rejected.", "reason", "rejections"),
    ("pd_attempts", "Attempts that ended.", "outcome", "attempts"),
)


class SnapshotCollector(Collector):
    """Turns the latest snapshot into metric families.

    `running` and `waiting` give the gateway's own gauges.
    """

    def __init__(self) -> None:
        self.running: Callable[[], int] = lambda: 0
        self.waiting: Callable[[], int] = lambda: 0
        self._snapshot = ClusterSnapshot()
        self._hit_rates: dict[WorkerId, HitRate] = {}

    def update(self, snapshot: ClusterSnapshot, now: float) -> None:
        self._snapshot = snapshot
        present = {each.worker for each in snapshot.workers}
        self._hit_rates = {key: rate for key, rate in self._hit_rates.items() if key in present}
        for worker in snapshot.workers:
            rate = self._hit_rates.setdefault(worker.worker, HitRate())
            rate.observe(now, worker.cache_queries, worker.cache_hits)

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._workers(self._snapshot.workers)
        yield from _coordinator(self._snapshot.coordinator or CoordinatorSnapshot())

    def _load(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "pd_num_requests_running", "Requests or sequences at work.", labels=_PER_WORKER
        )
        waiting = GaugeMetricFamily(
            "pd_num_requests_waiting", "Requests or sequences that wait.", labels=_PER_WORKER
        )
        running.add_metric(["gateway", "gateway"], self.running())
        waiting.add_metric(["gateway", "gateway"], self.waiting())
        if coordinator := self._snapshot.coordinator:
            running.add_metric(["coordinator", "coordinator"], coordinator.running)
            waiting.add_metric(["coordinator", "coordinator"], coordinator.waiting)
        for each in self._snapshot.workers:
            running.add_metric([each.role, each.worker.name], each.running)
            waiting.add_metric([each.role, each.worker.name], each.waiting)
        yield running
        yield waiting

    def _workers(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        tokens = GaugeMetricFamily(
            "pd_kv_tokens", "Tokens of the KV pool by state.", labels=[*_PER_WORKER, "state"]
        )
        hit_rate = GaugeMetricFamily(
            "pd_prefix_cache_hit_rate",
            "Prompt tokens found of those looked up, over the last minute that had any.",
            labels=_PER_WORKER,
        )
        for each in workers:
            labels = [each.role, each.worker.name]
            for state, attribute in _TOKEN_STATES.items():
                tokens.add_metric([*labels, state], getattr(each, attribute))
            hit_rate.add_metric(labels, self._hit_rates[each.worker].rate)
        yield tokens
        yield hit_rate
        for name, text, attribute in _WORKER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_PER_WORKER)
            for each in workers:
                gauge.add_metric([each.role, each.worker.name], getattr(each, attribute))
            yield gauge
        for name, text, attribute in _WORKER_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_PER_WORKER)
            for each in workers:
                counter.add_metric([each.role, each.worker.name], getattr(each, attribute))
            yield counter
        for name, text, label, attribute in _WORKER_LABELLED:
            counter = CounterMetricFamily(name, text, labels=[*_PER_WORKER, label])
            for each in workers:
                for value, count in getattr(each, attribute).items():
                    counter.add_metric([each.role, each.worker.name, value], count)
            yield counter
        for name, text, attribute in _WORKER_HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=_PER_WORKER)
            for each in workers:
                buckets, total = _cumulative(getattr(each, attribute))
                histogram.add_metric([each.role, each.worker.name], buckets, total)
            yield histogram


def _coordinator(coordinator: CoordinatorSnapshot) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        "pd_workers", "Workers as the coordinator sees them.", labels=["role", "state"]
    )
    counts: dict[tuple[str, str], int] = {("prefill", "ready"): 0, ("decode", "ready"): 0}
    for each in coordinator.workers:
        key = (each.role, each.state)
        counts[key] = counts.get(key, 0) + 1
    for (role, state), count in counts.items():
        workers.add_metric([role, state], count)
    yield workers
    for name, text, label, attribute in _COORDINATOR_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=[label])
        for value, count in getattr(coordinator, attribute).items():
            counter.add_metric([value], count)
        yield counter


def _cumulative(histogram: HistogramSnapshot) -> tuple[list[tuple[str, float]], float]:
    """Prometheus' buckets, each with all observations at most its bound, and the sum of values."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
        below += count
        buckets.append((str(bound), below))
    return buckets, histogram.total
