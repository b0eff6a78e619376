"""The cluster's endpoint, from snapshots."""

from __future__ import annotations

import re

import pytest

from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.observability.snapshots import (
    LATENCY_BUCKETS,
    CoordinatorSnapshot,
    Histogram,
    WorkerStatus,
)
from pd_cluster.types import Sources, WorkerId
from tests.observability.endpoint import Endpoint, worker
from tests.observability.samples import Samples, value

PREFILL = WorkerId("prefill-0", "a")
LABELS = {"role": "decode", "worker": "decode-0"}


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
        transfers_in_flight=3,
        index_lag_s=1.5,
        host_tokens={"free": 8, "evictable": 4},
        cache_queries=200,
        cache_hits=50,
        evicted=7,
        transfer_bytes=1000,
        transfer_avoided_bytes=500,
        transfer_descriptors=9,
        transfer_failures={"timeout": 2},
        retractions={"length": 1},
        retracted_tokens=33,
        transfer_seconds=transfer.snapshot(),
        tier_loaded_tokens={"host": 11, "disk": 12},
        tier_loaded_bytes={"host": 110, "disk": 120},
        tier_stored_tokens={"host": 21, "disk": 22},
        tier_stored_bytes={"host": 210, "disk": 220},
        tier_skipped_tokens=5,
        tier_errors=6,
    )
    found = Endpoint().show(decode, worker(worker=PREFILL, role="prefill"))
    tokens = {
        state: value(found, "pd_kv_tokens", **LABELS, state=state)
        for state in ("free", "private", "inflight", "protected", "evictable")
    }
    assert tokens == {"free": 50, "private": 5, "inflight": 10, "protected": 15, "evictable": 20}
    assert sum(tokens.values()) == decode.capacity
    for name, expected in {
        "pd_num_requests_running": 4,
        "pd_num_requests_waiting": 1,
        "pd_num_transfers_inflight": 3,
        "pd_prefix_index_lag_seconds": 1.5,
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
        "pd_tier_skipped_tokens_total": 5,
        "pd_tier_errors_total": 6,
    }.items():
        assert value(found, name, **LABELS) == pytest.approx(expected), name
    assert value(found, "pd_kv_transfer_failures_total", **LABELS, reason="timeout") == 2
    assert value(found, "pd_kv_transfer_failures_total", **LABELS, reason="peer lost") == 0
    assert value(found, "pd_retractions_total", **LABELS, policy="length") == 1
    host = {**LABELS, "tier": "host"}
    assert value(found, "pd_tier_tokens", **host, state="free") == 8
    for kind, tokens_and_bytes in {"loaded": (11, 110, 12), "stored": (21, 210, 22)}.items():
        assert value(found, f"pd_tier_{kind}_tokens_total", **host) == tokens_and_bytes[0]
        assert value(found, f"pd_tier_{kind}_bytes_total", **host) == tokens_and_bytes[1]
        disk = {**LABELS, "tier": "disk"}
        assert value(found, f"pd_tier_{kind}_tokens_total", **disk) == tokens_and_bytes[2]
    buckets = [
        value(found, "pd_kv_transfer_seconds_bucket", **LABELS, le=le)
        for le in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [2, 3, 4]
    assert value(found, "pd_kv_tokens", role="prefill", worker="prefill-0", state="free") == 100


def test_the_coordinator_and_who_is_there():
    def status(name: str, state: str = "ready", silent_s: float = 0.0) -> WorkerStatus:
        return WorkerStatus(
            worker=WorkerId(name, "c"), role="decode", state=state, silent_s=silent_s
        )

    coordinator = CoordinatorSnapshot(
        workers=(
            *(status("decode-0"), status("decode-1", silent_s=9.0)),
            *(status("decode-2", "draining"), status("decode-3", silent_s=10.0)),
        ),
        lost=(status("decode-4", "lost"),),
        waiting=5,
        running=6,
        placements={"local": 7},
        rejections={"queue_full": 8},
        attempts={"finished": 9},
        leases_expired=4,
    )
    found = Endpoint().show(coordinator=coordinator, silent_gateways=1)
    states = {
        (role, state): value(found, "pd_workers", role=role, state=state)
        for role, state in (
            *(("decode", "ready"), ("decode", "draining"), ("decode", "lost")),
            *(("prefill", "ready"), ("gateway", "ready"), ("gateway", "lost")),
        )
    }
    assert list(states.values()) == [2, 1, 2, 0, 0, 1]
    labels = {"role": "coordinator", "worker": "coordinator"}
    assert value(found, "pd_num_requests_waiting", **labels) == 5
    assert value(found, "pd_num_requests_running", **labels) == 6
    assert value(found, "pd_placements_total", route="local") == 7
    assert value(found, "pd_placements_total", route="remote") == 0
    assert value(found, "pd_admission_rejected_total", reason="queue_full") == 8
    assert value(found, "pd_attempts_total", outcome="finished") == 9
    assert value(found, "pd_leases_expired_total") == 4


def test_gateways_are_added_up_with_the_stages_that_workers_see():
    gateways = [GatewayMetrics("tiny", "gateway-0"), GatewayMetrics("tiny", "gateway-1")]
    for number, each in enumerate(gateways):
        each.watch_gateway(lambda: 1, lambda: 2, lambda: 3)
        each.first_token(0.2, 10, Sources(computed=10))
        each.stage("tokenize", 0.002)
        each.finished("stop" if number else "length", 1.0)
    decode = Histogram(LATENCY_BUCKETS)
    decode.observe(0.004)
    decode.observe(7.0)
    found = Endpoint().show(
        worker(stage_seconds={"decode": decode.snapshot()}),
        worker(worker=WorkerId("decode-1", "c"), stage_seconds={"decode": decode.snapshot()}),
        gateways=tuple(each.snapshot() for each in gateways),
    )
    tiny = {"model": "tiny"}
    assert value(found, "pd_prompt_tokens_total", **tiny) == 20
    assert value(found, "pd_request_total", **tiny, finish_reason="stop") == 1
    assert value(found, "pd_request_total", **tiny, finish_reason="length") == 1
    assert value(found, "pd_time_to_first_token_seconds_count", **tiny) == 2
    assert value(found, "pd_request_stage_seconds_count", **tiny, stage="tokenize") == 2
    assert value(found, "pd_request_stage_seconds_count", **tiny, stage="decode") == 4
    assert value(found, "pd_request_stage_seconds_bucket", **tiny, stage="decode", le="0.005") == 2
    for name in ("gateway-0", "gateway-1"):
        labels = {"role": "gateway", "worker": name}
        assert value(found, "pd_num_requests_running", **labels) == 1
        assert value(found, "pd_num_requests_waiting", **labels) == 2
        assert value(found, "pd_num_requests_retracted", **labels) == 3
    assert value(found, "pd_workers", role="gateway", state="ready") == 2


def test_no_counter_goes_down_when_a_worker_dies_returns_and_is_removed():
    endpoint = Endpoint()
    busy = Histogram((1.0,))
    busy.observe(0.5)
    first = worker(
        cache_queries=10,
        retractions={"length": 2},
        transfer_seconds=busy.snapshot(),
        free=40,
    )

    def counts(found: Samples) -> tuple[float, ...]:
        return (
            value(found, "pd_prefix_cache_queries_total", **LABELS),
            value(found, "pd_retractions_total", **LABELS, policy="length"),
            value(found, "pd_kv_transfer_seconds_count", **LABELS),
        )

    assert counts(endpoint.show(first)) == (10, 2, 1)
    # It counts on, says so with a heartbeat, and dies.
    endpoint.workers.observe(worker(cache_queries=15, retractions={"length": 2}, number=5))
    gone = endpoint.show()
    assert counts(gone) == (15, 2, 0)
    assert ("pd_kv_tokens", tuple(sorted({**LABELS, "state": "free"}.items()))) not in gone
    again = WorkerId("decode-0", "second")
    assert counts(endpoint.show(worker(worker=again, cache_queries=1))) == (16, 2, 0)
    # What was on its way from the first life changes nothing, nor does what is older than known.
    endpoint.workers.observe(worker(cache_queries=11, number=9))
    endpoint.workers.observe(worker(worker=again, cache_queries=0, number=0))
    later = worker(worker=again, cache_queries=3, retractions={"priority": 1}, number=2)
    found = endpoint.show(later)
    assert counts(found) == (18, 2, 0)
    assert value(found, "pd_retractions_total", **LABELS, policy="priority") == 1


def test_a_gateway_that_restarts_counts_on():
    endpoint = Endpoint()
    for expected in (1, 2):
        gateway = GatewayMetrics("tiny", "gateway-0")  # a new life each time
        gateway.finished("stop", 1.0)
        found = endpoint.show(gateways=(gateway.snapshot(),))
        assert value(found, "pd_request_total", model="tiny", finish_reason="stop") == expected
    found = endpoint.show(silent_gateways=1)
    assert value(found, "pd_request_total", model="tiny", finish_reason="stop") == 2


def test_the_hit_rate_rises_as_in_the_walk_through():
    endpoint = Endpoint()
    rates = []
    for second, (queries, hits) in enumerate([(2000, 0), (4000, 1990), (6000, 3980)]):
        endpoint.now = float(second)
        found = endpoint.show(worker(cache_queries=queries, cache_hits=hits, number=second))
        rates.append(value(found, "pd_prefix_cache_hit_rate", **LABELS))
    assert rates == pytest.approx([0.0, 0.4975, 3980 / 6000])
    # A restarted worker of the same name starts anew.
    reborn = worker(worker=WorkerId("decode-0", "z"), cache_queries=10, cache_hits=0)
    endpoint.now = 4.0
    assert value(endpoint.show(reborn), "pd_prefix_cache_hit_rate", **LABELS) == 0.0


def test_names_follow_the_rules_and_each_says_what_it_is():
    gateway = GatewayMetrics("tiny")
    text = Endpoint().text(
        coordinator=CoordinatorSnapshot(), workers=(worker(),), gateways=(gateway.snapshot(),)
    )
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    assert all(re.fullmatch(r"pd_[a-z0-9_]+", name) for name in types)
    counters = {name for name, kind in types.items() if kind == "counter"}
    assert all(name.endswith("_total") for name in counters)
    assert all(name.endswith("_seconds") for name, kind in types.items() if kind == "histogram")
    assert not any(name.endswith("_total") for name in types.keys() - counters)
    for name, help_text in re.findall(r"^# HELP (\S+) ?(.*)$", text, re.MULTILINE):
        assert help_text, name


def test_histogram_counts_bounds_inclusively():
    histogram = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(each)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 1)
    assert snapshot.total == 7.5
