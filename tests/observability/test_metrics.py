from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    Histogram,
    WorkerSnapshot,
    WorkerStatus,
)
from pd_cluster.types import Sources, WorkerId

PREFILL, DECODE = WorkerId("prefill-0", "a"), WorkerId("decode-0", "b")


def worker(**fields) -> WorkerSnapshot:
    values = {"worker": DECODE, "role": "decode", "capacity": 100, "free": 100}
    return WorkerSnapshot(**{**values, **fields})


def samples(metrics: GatewayMetrics, snapshot: ClusterSnapshot, now: float = 0.0) -> dict:
    """{(name, labels as sorted pairs): value}; the text is valid, and no family comes twice."""
    text = metrics.render(snapshot, now).decode()
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_requests_of_the_gateway():
    metrics = GatewayMetrics("tiny")
    metrics.watch_gateway(lambda: 3, lambda: 2)
    metrics.stage("tokenize", 0.002)
    metrics.first_token(0.2, 10, Sources(computed=6, prefill_hit=3, decode_hit=1))
    metrics.generated(1)
    metrics.next_tokens(0.03)
    metrics.generated(2)
    metrics.finished("stop", 1.5, ("worker_lost",))
    metrics.finished("error", 0.5)
    found = samples(metrics, ClusterSnapshot())
    tiny = {"model": "tiny"}
    assert value(found, "pd_time_to_first_token_seconds_count", **tiny) == 1
    assert value(found, "pd_time_to_first_token_seconds_sum", **tiny) == pytest.approx(0.2)
    assert value(found, "pd_inter_token_latency_seconds_count", **tiny) == 1
    assert value(found, "pd_e2e_request_latency_seconds_sum", **tiny) == pytest.approx(2.0)
    stage = {**tiny, "stage": "tokenize"}
    assert value(found, "pd_request_stage_seconds_count", **stage) == 1
    assert value(found, "pd_prompt_tokens_total", **tiny) == 10
    assert value(found, "pd_generation_tokens_total", **tiny) == 3
    sources = {
        source: value(found, "pd_prompt_tokens_by_source_total", **tiny, source=source)
        for source in ("computed", "prefill_hit", "decode_hit")
    }
    assert sources == {"computed": 6, "prefill_hit": 3, "decode_hit": 1}
    for reason, count in {"stop": 1, "error": 1, "length": 0, "abort": 0}.items():
        assert value(found, "pd_request_total", **tiny, finish_reason=reason) == count
    assert value(found, "pd_request_recovered_total", **tiny, cause="worker_lost") == 1
    gateway = {"role": "gateway", "worker": "gateway"}
    assert value(found, "pd_num_requests_running", **gateway) == 3
    assert value(found, "pd_num_requests_waiting", **gateway) == 2
    assert metrics.cache_hit_rate == 0.4
    assert metrics.totals == {"prompt": 10, "cached": 4, "generation": 3, "requests": 2}


def test_workers():
    transfer = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        transfer.observe(seconds)
    decode = worker(
        free=50,
        private=5,
        in_flight=10,
        protected=15,
        evictable=20,
        running=4,
        waiting=1,
        retracted=2,
        transfers_in_flight=3,
        cache_queries=200,
        cache_hits=50,
        evicted=7,
        transfer_bytes=1000,
        transfer_avoided_bytes=500,
        transfer_descriptors=9,
        transfer_failures={"timeout": 2},
        retractions={"youngest": 1},
        retracted_tokens=33,
        transfer_seconds=transfer.snapshot(),
    )
    prefill = worker(worker=PREFILL, role="prefill")
    found = samples(GatewayMetrics("tiny"), ClusterSnapshot(workers=(decode, prefill)))
    labels = {"role": "decode", "worker": "decode-0"}
    tokens = {
        state: value(found, "pd_kv_tokens", **labels, state=state)
        for state in ("free", "private", "inflight", "protected", "evictable")
    }
    assert tokens == {"free": 50, "private": 5, "inflight": 10, "protected": 15, "evictable": 20}
    assert sum(tokens.values()) == decode.capacity
    for name, expected in {
        "pd_num_requests_running": 4,
        "pd_num_requests_waiting": 1,
        "pd_num_requests_retracted": 2,
        "pd_num_transfers_inflight": 3,
        "pd_prefix_cache_queries_total": 200,
        "pd_prefix_cache_hits_total": 50,
        "pd_prefix_cache_hit_rate": 0.25,
        "pd_evicted_tokens_total": 7,
        "pd_kv_transfer_bytes_total": 1000,
        "pd_kv_transfer_avoided_bytes_total": 500,
        "pd_kv_transfer_descriptors_total": 9,
        "pd_retracted_tokens_total": 33,
        "pd_kv_transfer_seconds_sum": 3.65,
        "pd_kv_transfer_seconds_count": 4,
        "pd_eviction_seconds_count": 0,
    }.items():
        assert value(found, name, **labels) == pytest.approx(expected), name
    assert value(found, "pd_kv_transfer_failures_total", **labels, reason="timeout") == 2
    assert value(found, "pd_retractions_total", **labels, policy="youngest") == 1
    buckets = [
        value(found, "pd_kv_transfer_seconds_bucket", **labels, le=le)
        for le in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [2, 3, 4]
    assert value(found, "pd_kv_tokens", role="prefill", worker="prefill-0", state="free") == 100


def test_the_coordinator():
    coordinator = CoordinatorSnapshot(
        workers=(
            WorkerStatus(worker=DECODE, role="decode", state="ready"),
            WorkerStatus(worker=WorkerId("decode-1", "c"), role="decode", state="ready"),
            WorkerStatus(worker=WorkerId("decode-2", "d"), role="decode", state="draining"),
        ),
        waiting=5,
        running=6,
        placements={"remote": 7},
        rejections={"queue_full": 8},
        attempts={"finished": 9},
    )
    found = samples(GatewayMetrics("tiny"), ClusterSnapshot(coordinator=coordinator))
    assert value(found, "pd_workers", role="decode", state="ready") == 2
    assert value(found, "pd_workers", role="decode", state="draining") == 1
    assert value(found, "pd_workers", role="prefill", state="ready") == 0
    labels = {"role": "coordinator", "worker": "coordinator"}
    assert value(found, "pd_num_requests_waiting", **labels) == 5
    assert value(found, "pd_num_requests_running", **labels) == 6
    assert value(found, "pd_placements_total", route="remote") == 7
    assert value(found, "pd_admission_rejected_total", reason="queue_full") == 8
    assert value(found, "pd_attempts_total", outcome="finished") == 9


def test_the_hit_rate_rises_as_in_the_walk_through():
    metrics = GatewayMetrics("tiny")
    labels = {"role": "decode", "worker": "decode-0"}
    rates = []
    for second, (queries, hits) in enumerate([(2000, 0), (4000, 1990), (6000, 3980)]):
        snapshot = ClusterSnapshot(workers=(worker(cache_queries=queries, cache_hits=hits),))
        found = samples(metrics, snapshot, float(second))
        rates.append(value(found, "pd_prefix_cache_hit_rate", **labels))
    assert rates == pytest.approx([0.0, 0.4975, 3980 / 6000])
    # A restarted worker of the same name starts anew.
    reborn = worker(worker=WorkerId("decode-0", "z"), cache_queries=10, cache_hits=0)
    found = samples(metrics, ClusterSnapshot(workers=(reborn,)), 4.0)
    assert value(found, "pd_prefix_cache_hit_rate", **labels) == 0.0


def test_names_follow_the_rules():
    metrics = GatewayMetrics("tiny")
    snapshot = ClusterSnapshot(coordinator=CoordinatorSnapshot(), workers=(worker(),))
    text = metrics.render(snapshot, 0.0).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    types = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    assert all(re.fullmatch(r"pd_[a-z0-9_]+", name) for name in types)
    counters = {name for name, kind in types.items() if kind == "counter"}
    assert all(name.endswith("_total") for name in counters)
    assert all(name.endswith("_seconds") for name, kind in types.items() if kind == "histogram")
    assert not any(name.endswith("_total") for name in types.keys() - counters)


def test_histogram_counts_bounds_inclusively():
    histogram = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(each)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 1)
    assert snapshot.total == 7.5


def test_each_metric_says_what_it_is():
    text = GatewayMetrics("tiny").render(ClusterSnapshot(), 0.0).decode()
    for name, help_text in re.findall(r"^# HELP (\S+) ?(.*)$", text, re.MULTILINE):
        assert help_text, name
