"""The metrics of a gateway and, read from snapshots at scrape time, of the cluster behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pd_cluster.observability.collector import SnapshotCollector
from pd_cluster.observability.snapshots import ClusterSnapshot
from pd_cluster.types import Sources

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_FINISH_REASONS = ("stop", "length", "abort", "error")


class GatewayMetrics:
    """Counters and histograms of one gateway, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._snapshots = SnapshotCollector()
        self.registry.register(self._snapshots)
        self._model = model

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                name, text, ("model", *labels), registry=self.registry, buckets=_LATENCY_BUCKETS
            )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model", *labels), registry=self.registry)

        # Children are looked up once: some of them are touched at every token.
        self._ttft = histogram(
            "pd_time_to_first_token_seconds", "From arrival, before tokenisation, to first token."
        ).labels(model)
        self._itl = histogram(
            "pd_inter_token_latency_seconds", "Between two steps that gave a request tokens."
        ).labels(model)
        self._e2e = histogram("pd_e2e_request_latency_seconds", "From arrival to the end.").labels(
            model
        )
        self._prompt_tokens = counter(
            "pd_prompt_tokens", "Prompt tokens of requests that began."
        ).labels(model)
        self._generation_tokens = counter("pd_generation_tokens", "Generated tokens.").labels(model)
        self._stages = histogram("pd_request_stage_seconds", "Time in a stage.", "stage")
        self._sources = counter(
            "pd_prompt_tokens_by_source", "Where the KV of prompt tokens came from.", "source"
        )
        self._requests = counter("pd_request", "Requests that ended.", "finish_reason")
        self._recovered = counter(
            "pd_request_recovered", "Finished requests that survived a trouble.", "cause"
        )
        for source in Sources.__struct_fields__:
            self._sources.labels(model, source)
        for reason in _FINISH_REASONS:
            self._requests.labels(model, reason)
        self._totals = {"prompt": 0, "cached": 0, "generation": 0, "requests": 0}

    def watch_gateway(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Reads the gateway's own gauges at scrape time."""
        self._snapshots.running, self._snapshots.waiting = running, waiting

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

    def render(self, snapshot: ClusterSnapshot, now: float) -> bytes:
        """Prometheus' text format; `now` in seconds of a monotonic clock."""
        self._snapshots.update(snapshot, now)
        return generate_latest(self.registry)
