"""What one gateway exports."""

from __future__ import annotations

import pytest

from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.types import Sources
from tests.observability.samples import parse, value

TINY = {"model": "tiny"}
GATEWAY = {"role": "gateway", "worker": "gateway"}


def used() -> GatewayMetrics:
    metrics = GatewayMetrics("tiny")
    metrics.watch_gateway(lambda: 3, lambda: 2, lambda: 1)
    metrics.stage("tokenize", 0.002)
    metrics.first_token(0.2, 10, Sources(computed=6, prefill_hit=3, decode_hit=1))
    metrics.generated(1)
    metrics.next_tokens(0.03)
    metrics.generated(2)
    metrics.finished("stop", 1.5, ("worker_lost",))
    metrics.finished("error", 0.5)
    return metrics


def test_requests():
    metrics = used()
    found = parse(metrics.render())
    assert value(found, "pd_time_to_first_token_seconds_count", **TINY) == 1
    assert value(found, "pd_time_to_first_token_seconds_sum", **TINY) == pytest.approx(0.2)
    assert value(found, "pd_inter_token_latency_seconds_count", **TINY) == 1
    assert value(found, "pd_e2e_request_latency_seconds_sum", **TINY) == pytest.approx(2.0)
    assert value(found, "pd_request_stage_seconds_count", **TINY, stage="tokenize") == 1
    assert value(found, "pd_prompt_tokens_total", **TINY) == 10
    assert value(found, "pd_generation_tokens_total", **TINY) == 3
    sources = {
        source: value(found, "pd_prompt_tokens_by_source_total", **TINY, source=source)
        for source in ("computed", "prefill_hit", "decode_hit")
    }
    assert sources == {"computed": 6, "prefill_hit": 3, "decode_hit": 1}
    for reason, count in {"stop": 1, "error": 1, "length": 0, "abort": 0}.items():
        assert value(found, "pd_request_total", **TINY, finish_reason=reason) == count
    for cause, count in {"worker_lost": 1, "retracted": 0, "failed": 0}.items():
        assert value(found, "pd_request_recovered_total", **TINY, cause=cause) == count
    assert value(found, "pd_num_requests_running", **GATEWAY) == 3
    assert value(found, "pd_num_requests_waiting", **GATEWAY) == 2
    assert value(found, "pd_num_requests_retracted", **GATEWAY) == 1
    assert value(found, "pd_prefix_cache_queries_total", **GATEWAY) == 10
    assert value(found, "pd_prefix_cache_hits_total", **GATEWAY) == 4
    assert value(found, "pd_prefix_cache_hit_rate", **GATEWAY) == 0.4
    assert metrics.cache_hit_rate == 0.4
    assert metrics.totals == {"prompt": 10, "cached": 4, "generation": 3, "requests": 2}


def test_the_snapshot_has_all_that_is_rendered():
    metrics = used()
    snapshot = metrics.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.retracted) == (3, 2, 1)
    assert snapshot.worker.name == "gateway"
    rendered = {
        key: value
        for key, value in parse(metrics.render()).items()
        if not key[0].endswith("_created") and not key[0].startswith(("pd_num_", "pd_prefix_"))
    }
    sent: dict = {}
    for samples in snapshot.samples.values():
        sent.update(samples)
    assert sent == rendered
    assert metrics.snapshot().number > snapshot.number
