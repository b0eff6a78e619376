"""Processes of a real cluster die: streams go on exactly, later requests are served."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

from tests.cluster.live import Live, poll

pytestmark = pytest.mark.cluster

PROMPTS = [[7000 + index, *range(4000, 4030)] for index in range(3)]
TOKENS = 40


def kill(cluster: Live, name: str) -> None:
    actor = cluster.server.cluster.actors[name]
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_streams_survive_the_death_of_a_worker(cluster: Live, victim: str) -> None:
    expected = [cluster.generate(prompt, TOKENS, ignore_eos=True).tokens for prompt in PROMPTS]
    cluster.flush()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [
            pool.submit(cluster.generate, prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS
        ]
        # In the middle of it: something has been generated, or is about to be.
        poll(lambda: busy(cluster), "nothing runs")
        time.sleep(0.5)
        kill(cluster, victim)
        answers = [each.result() for each in asked]
    assert [answer.tokens for answer in answers] == expected
    poll(lambda: len(cluster.info()["workers"]) == 2, "the worker did not come back")


def test_streams_outlive_the_coordinator_and_who_waits_for_it_is_placed(cluster: Live) -> None:
    """Twice, so that the second dies who was reached by another line than the first."""
    expected = [cluster.generate(prompt, TOKENS, ignore_eos=True).tokens for prompt in PROMPTS]
    for _ in range(2):
        cluster.flush()
        with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
            before = [
                pool.submit(cluster.generate, prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS
            ]
            poll(lambda: busy(cluster), "nothing runs")
            kill(cluster, "coordinator")
            after = [
                pool.submit(cluster.generate, prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS
            ]
            answers = [each.result() for each in before + after]
        assert [answer.tokens for answer in answers] == expected * 2
    poll(lambda: not busy(cluster), "leases stay")


def test_a_gateway_that_died_serves_again(cluster: Live) -> None:
    kill(cluster, "gateway-0")

    def serves() -> bool:
        cluster.server.check()
        try:
            return cluster.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    poll(serves, "the gateway did not come back")
    assert len(cluster.generate(PROMPTS[0], 4, ignore_eos=True).tokens) == 4


def busy(cluster: Live) -> bool:
    return bool(cluster.info()["coordinator"]["running"])
