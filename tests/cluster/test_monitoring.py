"""A real cluster's metrics: exact for a load of known answers, and what Prometheus, the dashboards
and the alerts make of them. One small cluster for all of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from pd_cluster.config import config_dir
from tests.cluster.live import Live, live, poll
from tests.cluster.prometheus import Prometheus, prometheus
from tests.cluster.test_movement import tokens
from tests.observability.promtool import needs_prometheus, rules
from tests.observability.samples import Samples, parse

pytestmark = [pytest.mark.cluster, needs_prometheus]

POOL, PROMPT, ANSWER = 256, 64, 4
PROMPTS = [tokens(PROMPT, seed=80 + number) for number in range(5)]
PAGE_BYTES = 2 * 30 * 3 * 64 * 4  # K and V of 30 layers, 3 heads of 64, float32
STAGES = ("tokenize", "queue", "reserve", "prefill", "transfer", "decode")
# A third of what is asked for fits, admission does not care, and few may wait.
SETTINGS = {
    # Every request by route remote: what is counted is known beforehand.
    "placement": "least_loaded",
    "max_total_tokens": POOL,
    "schedule_conservativeness": 0.05,
    "max_running_requests": 8,
    "max_queued_requests": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_storage_backend": "file",
}


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over all series of that name with these labels; there must be one."""
    values = [
        value for (each, own), value in found.items() if each == name and labels.items() <= set(own)
    ]
    assert values, (name, labels)
    return sum(values)


def scrape(cluster: Live) -> Samples:
    return parse(cluster.scrape().encode())


@pytest.mark.timeout(600)
def test_monitoring(tmp_path: Path) -> None:
    storage = {"hicache_storage_backend_extra_config": {"path": str(tmp_path / "kv")}}
    with live(**SETTINGS, **storage) as cluster:
        poll(lambda: bool(cluster.info()["coordinator"]["metrics_url"]), "no metrics")
        url = cluster.info()["coordinator"]["metrics_url"]
        with prometheus(url, tmp_path) as server:
            poll(lambda: bool(server.ask('up{job="pd-cluster"} == 1')), "nothing is scraped")
            for prompt in (*PROMPTS, PROMPTS[-1]):
                cluster.generate(prompt, ANSWER, ignore_eos=True)
                cluster.settle()
            first = scrape(cluster)
            check_known_answers(first)
            refused, aborted = burst(cluster)
            second = scrape(cluster)
            check_burst(cluster, first, second, refused, aborted)
            assert second.keys() == first.keys(), "labels grow with traffic"
            check_a_gateway_alone(cluster, second)
            check_prometheus(server, second)
        counted = {
            key: value for key, value in second.items() if key[0].endswith(("_total", "_count"))
        }
        check_a_hung_worker(cluster, counted)
        check_a_dead_worker(cluster, counted)


def check_known_answers(found: Samples) -> None:
    """Five prompts one after another, and the last one again, in a pool of four."""
    asked, again = len(PROMPTS), 1
    requests = asked + again
    kept = PROMPT + ANSWER - 1  # the last token's KV is never computed
    prefill, decode = {"role": "prefill"}, {"role": "decode"}
    for name, labels, expected in [
        ("pd_request_total", {"finish_reason": "length"}, requests),
        *(("pd_request_total", {"finish_reason": each}, 0) for each in ("stop", "abort", "error")),
        ("pd_prompt_tokens_total", {}, requests * PROMPT),
        ("pd_generation_tokens_total", {}, requests * ANSWER),
        ("pd_prompt_tokens_by_source_total", {}, requests * PROMPT),
        ("pd_prompt_tokens_by_source_total", {"source": "computed"}, asked * PROMPT + 1),
        ("pd_prompt_tokens_by_source_total", {"source": "prefill_hit"}, PROMPT - 1),
        ("pd_time_to_first_token_seconds_count", {}, requests),
        ("pd_inter_token_latency_seconds_count", {}, requests * (ANSWER - 1)),
        ("pd_e2e_request_latency_seconds_count", {}, requests),
        *(("pd_request_stage_seconds_count", {"stage": each}, requests) for each in STAGES),
        ("pd_request_recovered_total", {}, 0),
        ("pd_prefix_cache_queries_total", prefill, requests * PROMPT),
        ("pd_prefix_cache_queries_total", decode, requests * PROMPT),
        ("pd_prefix_cache_hits_total", prefill, PROMPT),
        ("pd_prefix_cache_hits_total", decode, PROMPT),
        # The fifth prompt finds four in the pool; so does the copy of its last page.
        ("pd_evicted_tokens_total", prefill, 2 * PROMPT),
        ("pd_eviction_seconds_count", prefill, 2),
        # Decode has room for three prompts with their answers.
        ("pd_evicted_tokens_total", decode, 2 * kept),
        ("pd_eviction_seconds_count", decode, 2),
        ("pd_kv_transfer_bytes_total", prefill, asked * PROMPT * PAGE_BYTES),
        ("pd_kv_transfer_bytes_total", decode, 0),
        ("pd_kv_transfer_avoided_bytes_total", decode, PROMPT * PAGE_BYTES),
        ("pd_kv_transfer_descriptors_total", prefill, asked * PROMPT),
        ("pd_kv_transfer_seconds_count", prefill, asked),
        ("pd_kv_transfer_failures_total", {}, 0),
        ("pd_placements_total", {"route": "remote"}, requests),
        ("pd_placements_total", {}, requests),
        ("pd_attempts_total", {"outcome": "finished"}, requests),
        ("pd_attempts_total", {}, requests),
        ("pd_admission_rejected_total", {}, 0),
        ("pd_leases_expired_total", {}, 0),
        ("pd_retractions_total", {}, 0),
        ("pd_retracted_tokens_total", {}, 0),
        ("pd_tier_stored_tokens_total", {**prefill, "tier": "host"}, asked * PROMPT),
        ("pd_tier_stored_bytes_total", {**prefill, "tier": "host"}, asked * PROMPT * PAGE_BYTES),
        ("pd_tier_stored_tokens_total", {**decode, "tier": "host"}, asked * kept),
        # Whole blocks of 64 tokens.
        ("pd_tier_stored_tokens_total", {**prefill, "tier": "disk"}, asked * PROMPT),
        ("pd_tier_stored_tokens_total", {**decode, "tier": "disk"}, asked * PROMPT),
        ("pd_tier_loaded_tokens_total", {}, 0),
        ("pd_tier_skipped_tokens_total", {}, 0),
        ("pd_tier_errors_total", {}, 0),
        *(
            ("pd_workers", {"role": role, "state": state}, number)
            for role in ("prefill", "decode", "gateway")
            for state, number in (("ready", 1), ("lost", 0))
        ),
        ("pd_kv_tokens", prefill, POOL),
        ("pd_kv_tokens", decode, POOL),
        ("pd_tier_tokens", {**decode, "state": "evictable"}, asked * kept),
    ]:
        assert total(found, name, **labels) == expected, (name, labels)
    check_idle(found)


def check_idle(found: Samples) -> None:
    for name in ("running", "waiting", "retracted"):
        assert total(found, f"pd_num_requests_{name}") == 0, name
    assert total(found, "pd_num_transfers_inflight") == 0
    for state in ("private", "protected", "inflight"):
        assert total(found, "pd_kv_tokens", state=state) == 0, state
        assert total(found, "pd_tier_tokens", state=state) == 0, state


def burst(cluster: Live) -> tuple[int, int]:
    """More than fits, waits or may wait, and some who leave. How many were refused, and left."""

    def ask(number: int) -> int:
        params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        body = {"input_ids": tokens(16, seed=100 + number), "sampling_params": params}
        return cluster.http.post("/generate", json=body).status_code

    def leave(number: int) -> None:
        params = {"temperature": 0, "max_new_tokens": 180, "ignore_eos": True}
        body = {"input_ids": tokens(16, seed=200 + number), "sampling_params": params}
        with cluster.http.stream("POST", "/generate", json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            next(reply.iter_lines())

    def finished(found: Samples) -> float:
        return total(found, "pd_request_total", finish_reason="abort")

    leavers = 2
    for number in range(leavers):
        leave(number)
    poll(lambda: finished(scrape(cluster)) == leavers, "aborts are not counted")
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(ask, range(20)))
    assert set(statuses) == {200, 429}
    # Once more what has left the pools: it is on the tiers below.
    for prompt in PROMPTS[:2]:
        cluster.generate(prompt, ANSWER, ignore_eos=True)
    cluster.settle()
    return statuses.count(429), leavers


def check_burst(cluster: Live, before: Samples, after: Samples, refused: int, aborted: int) -> None:
    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    served = 20 - refused + 2
    assert more("pd_request_total", finish_reason="length") == served
    assert more("pd_request_total", finish_reason="abort") == aborted
    assert more("pd_request_total", finish_reason="error") == refused
    assert more("pd_admission_rejected_total", reason="queue_full") == refused
    assert more("pd_admission_rejected_total") == refused
    retracted = more("pd_retractions_total", policy="length")
    assert retracted == more("pd_retractions_total") > 0
    assert more("pd_retracted_tokens_total") >= retracted
    assert more("pd_attempts_total", outcome="retracted") == retracted
    assert more("pd_attempts_total", outcome="finished") == served
    assert more("pd_attempts_total", outcome="aborted") == aborted
    assert more("pd_placements_total") == more("pd_attempts_total")
    assert 0 < more("pd_request_recovered_total", cause="retracted") <= retracted
    assert more("pd_evicted_tokens_total") > 0
    assert more("pd_prompt_tokens_by_source_total") == more("pd_prompt_tokens_total")
    workers = {
        name: ray.get(actor.counters.remote())
        for name, actor in cluster.server.cluster.actors.items()
        if name.startswith(("prefill", "decode"))
    }
    for name, counters in workers.items():
        for tier, counter in {"host": "host_loaded", "disk": "storage_loaded"}.items():
            found = total(after, "pd_tier_loaded_tokens_total", worker=name, tier=tier)
            assert found == counters[counter]
    assert total(after, "pd_tier_loaded_tokens_total") > 0
    check_idle(after)


def check_a_gateway_alone(cluster: Live, found: Samples) -> None:
    """What it says is what the cluster's endpoint says of it, and no worker is in it."""
    alone = parse(cluster.http.get("/metrics").content)
    assert {dict(labels).get("worker", "gateway-0") for _, labels in alone} == {"gateway-0"}
    for (name, labels), value in alone.items():
        if name.endswith("_total") and "role" not in dict(labels):
            assert found[name, labels] == value


def check_prometheus(server: Prometheus, found: Samples) -> None:
    """Every expression of every panel, and the left-hand side of every alert, gives data."""
    generated = total(found, "pd_generation_tokens_total")

    def has_all() -> bool:
        return server.ask("sum(pd_generation_tokens_total)") == [({}, generated)]

    poll(has_all, "the last scrape is not there")
    for path in sorted((config_dir() / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "2m").replace("$cluster", "pd")
                assert server.ask(expr), f"{path.stem}: {panel['title']}: {expr}"
    for rule in rules("recording"):
        assert server.ask(rule["record"]), rule["record"]
    for rule in rules("alerts"):
        left = re.split(r" (?:>|==) [\d.]+$", rule["expr"])[0]
        assert left != rule["expr"], f"{rule['alert']}: no comparison at the end"
        assert server.ask(left), f"{rule['alert']}: {left}"
    loaded = server.get("rules", type="alert")["groups"]
    assert {rule["name"] for group in loaded for rule in group["rules"]} == {
        rule["alert"] for rule in rules("alerts")
    }
    assert all(rule["health"] == "ok" for group in loaded for rule in group["rules"])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pid_of(cluster: Live, name: str) -> int:
    actor = cluster.server.cluster.actors[name]
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def check_a_hung_worker(cluster: Live, counted: Samples) -> None:
    """The scrape comes back without it: its gauges are away, its counters stay."""
    free = ("pd_kv_tokens", (("role", "decode"), ("state", "free"), ("worker", "decode-0")))
    url = cluster.info()["coordinator"]["metrics_url"]
    with stopped(pid_of(cluster, "decode-0")):
        found = parse(cluster.http.get(url).content)
        assert free not in found
        assert all(found[key] >= value for key, value in counted.items())
    poll(lambda: free in scrape(cluster), "it does not answer again")


def check_a_dead_worker(cluster: Live, counted: Samples) -> None:
    """No counter goes down while it is gone, and none when it is back."""
    os.kill(pid_of(cluster, "prefill-0"), signal.SIGKILL)

    def state(name: str) -> float:
        found = scrape(cluster)
        assert all(found[key] >= value for key, value in counted.items())
        return total(found, "pd_workers", role="prefill", state=name)

    poll(lambda: state("lost") == 1, "it is not lost")
    poll(lambda: state("ready") == 1, "it did not come back")
    assert state("lost") == 0
    cluster.generate(PROMPTS[0], ANSWER, ignore_eos=True)
    cluster.settle()
    key = (
        "pd_prefix_cache_queries_total",
        (("role", "prefill"), ("worker", "prefill-0")),
    )
    assert scrape(cluster)[key] == counted[key] + PROMPT
