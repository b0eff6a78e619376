"""Tiers of a real cluster: what the pools cannot hold is not computed again, even restarted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import ray

from tests.cluster.conftest import Judge
from tests.cluster.live import Live, live

pytestmark = pytest.mark.cluster

POOL = 768
LENGTH = 192


def working_set() -> list[list[int]]:
    """Prompts of twice the pool."""
    rng = random.Random(7)
    count = 2 * POOL // LENGTH
    return [[rng.randrange(1000, 40000) for _ in range(LENGTH)] for _ in range(count)]


def tier_counters(cluster: Live, name: str) -> int:
    actors = cluster.server.cluster.actors
    workers = [actor for key, actor in actors.items() if key.startswith(("prefill", "decode"))]
    return sum(ray.get(worker.counters.remote())[name] for worker in workers)


@pytest.mark.timeout(900)  # two starts
def test_what_the_pools_cannot_hold_comes_from_host_and_then_from_disk(
    tmp_path: Path, judge: Judge
) -> None:
    settings = {
        "max_total_tokens": POOL,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.0,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": str(tmp_path / "kv")},
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    prompts = working_set()
    with live(**settings) as cluster:
        cold = [cluster.generate(prompt, 4) for prompt in prompts]
        cluster.settle()
        computed = cluster.moved().computed
        warm = [cluster.generate(prompt, 4) for prompt in prompts]
        cluster.settle()
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

    with live(**settings) as cluster:
        restarted = [cluster.generate(prompt, 4) for prompt in prompts]
        cluster.settle()
        assert [answer.tokens for answer in restarted] == [answer.tokens for answer in cold]
        # Whole blocks of 64 tokens: all of these prompts, but for the token that is computed again.
        assert [answer.cached_tokens for answer in restarted] == [LENGTH - 1] * len(prompts)
        assert tier_counters(cluster, "storage_loaded") >= len(prompts) * LENGTH
