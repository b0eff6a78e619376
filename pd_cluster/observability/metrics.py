"""The metrics of one gateway: what it counts of its requests, and its own gauges."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_cluster.observability.hit_rate import HitRate
from pd_cluster.observability.snapshots import LATENCY_BUCKETS, GatewaySnapshot, SampleKey
from pd_cluster.types import Sources, WorkerId

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RUNNING = ("pd_num_requests_running", "Requests or sequences at work.")
WAITING = ("pd_num_requests_waiting", "Requests or sequences that wait.")
RETRACTED = ("pd_num_requests_retracted", "Requests that were retracted and wait to go on.")
QUERIES = ("pd_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
HITS = ("pd_prefix_cache_hits", "Prompt tokens found in the prefix cache.")
HIT_RATE = (
    "pd_prefix_cache_hit_rate",
    "Prompt tokens found of those looked up, over the last minute that had any.",
)
STAGES = ("pd_request_stage_seconds", "Time in a stage.")
# The other families: names without `_total`, types and texts, for whoever shows them elsewhere.
FAMILIES = {
    "pd_time_to_first_token_seconds": (
        "histogram",
        "From arrival, before tokenisation, to first token.",
    ),
    "pd_inter_token_latency_seconds": (
        "histogram",
        "Between two steps that gave a request tokens.",
    ),
    "pd_e2e_request_latency_seconds": ("histogram", "From arrival to the end."),
    STAGES[0]: ("histogram", STAGES[1]),
    "pd_prompt_tokens": ("counter", "Prompt tokens of requests that began."),
    "pd_generation_tokens": ("counter", "Generated tokens."),
    "pd_prompt_tokens_by_source": ("counter", "Where the KV of prompt tokens came from."),
    "pd_request": ("counter", "Requests that ended."),
    "pd_request_recovered": ("counter", "Finished requests that survived a trouble."),
}
_FINISH_REASONS = ("stop", "length", "abort", "error")
_CAUSES = ("retracted", "failed", "worker_lost")


class _CacheFigures(Collector):
    """What this gateway's requests found in the caches, under the names that workers have for
    theirs. The cluster's endpoint has the workers' only.
    """

    def __init__(self, name: str, totals: Callable[[], dict[str, int]]) -> None:
        self._labels = ["gateway", name]
        self._totals = totals
        self._rate = HitRate()

    def collect(self) -> Iterator[Metric]:
        queries, hits = (self._totals()[each] for each in ("prompt", "cached"))
        self._rate.observe(time.monotonic(), queries, hits)
        names = ("role", "worker")
        counts = (CounterMetricFamily(*QUERIES, labels=names), queries)
        found = (CounterMetricFamily(*HITS, labels=names), hits)
        rate = (GaugeMetricFamily(*HIT_RATE, labels=names), self._rate.rate)
        for family, value in (counts, found, rate):
            family.add_metric(self._labels, value)
            yield family


class GatewayMetrics:
    """Counters, histograms and gauges of one gateway, in a registry of their own."""

    def __init__(self, model: str, name: str = "gateway") -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._worker = WorkerId(name, secrets.token_hex(4))
        self._snapshots = 0

        def histogram(name: str, *labels: str) -> Histogram:
            names = ("model", *labels)
            _, text = FAMILIES[name]
            return Histogram(name, text, names, registry=self.registry, buckets=LATENCY_BUCKETS)

        def counter(name: str, *labels: str) -> Counter:
            return Counter(name, FAMILIES[name][1], ("model", *labels), registry=self.registry)

        # Children are looked up once: some of them are touched at every token.
        self._ttft = histogram("pd_time_to_first_token_seconds").labels(model)
        self._itl = histogram("pd_inter_token_latency_seconds").labels(model)
        self._e2e = histogram("pd_e2e_request_latency_seconds").labels(model)
        self._stages = histogram(STAGES[0], "stage")
        self._prompt_tokens = counter("pd_prompt_tokens").labels(model)
        self._generation_tokens = counter("pd_generation_tokens").labels(model)
        self._sources = counter("pd_prompt_tokens_by_source", "source")
        self._requests = counter("pd_request", "finish_reason")
        self._recovered = counter("pd_request_recovered", "cause")
        # What can be counted is there from the start: a rate needs a first zero.
        for source in Sources.__struct_fields__:
            self._sources.labels(model, source)
        for reason in _FINISH_REASONS:
            self._requests.labels(model, reason)
        for cause in _CAUSES:
            self._recovered.labels(model, cause)
        self._gauges = [
            Gauge(*each, ("role", "worker"), registry=self.registry).labels("gateway", name)
            for each in (RUNNING, WAITING, RETRACTED)
        ]
        self._counts: tuple[Callable[[], int], ...] = (lambda: 0,) * len(self._gauges)
        self._totals = {"prompt": 0, "cached": 0, "generation": 0, "requests": 0}
        self.registry.register(_CacheFigures(name, lambda: self._totals))

    def watch_gateway(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        retracted: Callable[[], int],
    ) -> None:
        """Reads the gateway's own gauges at scrape time."""
        self._counts = (running, waiting, retracted)
        for gauge, count in zip(self._gauges, self._counts, strict=True):
            gauge.set_function(count)

    def stage(self, stage: str, seconds: float) -> None:
        self._stages.labels(self._model, stage).observe(seconds)

    def first_token(self, ttft_s: float, prompt_tokens: int, sources: Sources | None) -> None:
        """The first token of a request, and with it the accounts of its prompt."""
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._totals["prompt"] += prompt_tokens
        if sources is None:
            return
        self._totals["cached"] += sources.cached
        for source in Sources.__struct_fields__:
            self._sources.labels(self._model, source).inc(getattr(sources, source))

    def next_tokens(self, gap_s: float) -> None:
        self._itl.observe(gap_s)

    def generated(self, tokens: int) -> None:
        self._generation_tokens.inc(tokens)
        self._totals["generation"] += tokens

    def finished(self, reason: str, e2e_s: float, recovered: Iterable[str] = ()) -> None:
        """`reason`: "stop", "length", "abort" or "error"."""
        self._requests.labels(self._model, reason).inc()
        self._e2e.observe(e2e_s)
        self._totals["requests"] += 1
        for cause in recovered:
            self._recovered.labels(self._model, cause).inc()

    @property
    def totals(self) -> dict[str, int]:
        """Tokens of prompts, of these from a cache, and generated; requests that ended."""
        return dict(self._totals)

    @property
    def cache_hit_rate(self) -> float:
        """The part of all prompt tokens that came from a cache, since the start."""
        return self._totals["cached"] / max(1, self._totals["prompt"])

    def snapshot(self) -> GatewaySnapshot:
        """All of it, for the cluster's endpoint."""
        self._snapshots += 1
        running, waiting, retracted = (count() for count in self._counts)
        samples: dict[str, dict[SampleKey, float]] = {}
        for family in self.registry.collect():
            if family.name in FAMILIES:
                samples[family.name] = {
                    (each.name, tuple(sorted(each.labels.items()))): each.value
                    for each in family.samples
                    if not each.name.endswith("_created")
                }
        return GatewaySnapshot(
            worker=self._worker,
            number=self._snapshots,
            running=running,
            waiting=waiting,
            retracted=retracted,
            samples=samples,
        )

    def render(self) -> bytes:
        """Prometheus' text format: this gateway alone, so that scraping several counts nothing
        twice.
        """
        return generate_latest(self.registry)
