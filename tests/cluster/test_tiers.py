"""Tiers of a real cluster: what the pools cannot hold is not computed again, even restarted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster.conftest import Judge
from tests.cluster.live import Generated, Live, live

pytestmark = pytest.mark.cluster

POOL = 640
LENGTH = 192
COUNT = 10


def working_set() -> list[list[int]]:
    """Prompts of thrice a pool: five for each prefill worker, whose pool has room for three."""
    rng = random.Random(7)
    return [[rng.randrange(1000, 40000) for _ in range(LENGTH)] for _ in range(COUNT)]


def tier_counters(cluster: Live, name: str) -> int:
    actors = cluster.server.cluster.actors
    workers = [actor for key, actor in actors.items() if key.startswith(("prefill", "decode"))]
    return sum(ray.get(worker.counters.remote())[name] for worker in workers)


def placed(cluster: Live, prompt: list[int]) -> tuple[Generated, dict[str, Any]]:
    """An answer, and why its prefill worker was chosen."""
    answer = cluster.generate(prompt, 4)
    (sequence,) = cluster.http.get(f"/admin/requests/{answer.id}").json()["sequences"]
    return answer, sequence["placements"][0]


@pytest.mark.timeout(900)  # two starts
def test_what_the_pools_cannot_hold_comes_from_host_and_then_from_disk(
    tmp_path: Path, judge: Judge
) -> None:
    settings = {
        "prefill": 2,
        "routes": ["remote"],  # so that each prompt is used where it was computed
        "max_total_tokens": POOL,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.0,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": str(tmp_path / "kv")},
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    prompts = working_set()
    with live(**settings) as cluster:
        first = [placed(cluster, prompt) for prompt in prompts]
        cluster.settle()
        computed = cluster.moved().computed
        second = [placed(cluster, prompt) for prompt in prompts]
        cluster.settle()
        cold, warm = ([answer for answer, _ in each] for each in (first, second))
        # A prompt that was evicted returns to the worker whose host memory has it.
        workers = [why["prefill"] for _, why in first]
        assert len(set(workers)) == 2
        assert [why["prefill"] for _, why in second] == workers
        # However the ten were shared out, those of whoever got more than three have all to go.
        evicted = [why for _, why in second if why["prefill_below"]]
        assert len(evicted) > len(prompts) // 2
        for why in evicted:
            best, other = why["candidates"]["prefill"]
            assert (best["held"] + best["below"], other["held"]) == (LENGTH - 1, 0)
            assert 0 < best["promote"] < best["cost"] < other["cost"]
        assert [answer.cached_tokens for answer in cold] == [0] * len(prompts)
        assert [answer.cached_tokens for answer in warm] == [LENGTH - 1] * len(prompts)
        assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
        assert cluster.moved().computed - computed == len(prompts)
        assert tier_counters(cluster, "host_loaded") > POOL
        again = cluster.generate_all(prompts, 4, 8)
        cluster.settle()
        assert [answer.tokens for answer in again] == [answer.tokens for answer in cold]
        assert tier_counters(cluster, "errors") == 0
    judge.check(prompts[0], warm[0].tokens)

    with live(**settings | {"prefill": 1}) as cluster:
        restarted = [cluster.generate(prompt, 4) for prompt in prompts]
        cluster.settle()
        assert [answer.tokens for answer in restarted] == [answer.tokens for answer in cold]
        # Whole blocks of 64 tokens: all of these prompts, but for the token that is computed again.
        assert [answer.cached_tokens for answer in restarted] == [LENGTH - 1] * len(prompts)
        assert tier_counters(cluster, "storage_loaded") >= len(prompts) * LENGTH
