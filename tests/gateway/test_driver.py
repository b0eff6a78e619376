from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

from pd_cluster.config import validate_config
from pd_cluster.coordinator.prefix_hash import block_hashes, unpack_hashes
from pd_cluster.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    Overloaded,
    RequestError,
    Unavailable,
)
from pd_cluster.gateway.backend import Generated, GenerateRequest
from pd_cluster.gateway.instructions import Started
from pd_cluster.types import AttemptId, Output, Rejection, SamplingParams, Sources, WorkerId

pytestmark = pytest.mark.anyio
DECODE = WorkerId("decode-0", "a")
OTHER = WorkerId("decode-1", "b")


@pytest.fixture
def ask(cluster):
    cluster.reply = [1, 2, 3, 4, 5, 6]

    def make(name: str = "r", max_tokens: int = 6) -> GenerateRequest:
        return GenerateRequest(
            request_id=name,
            prompt=(10, 11, 12),
            params=SamplingParams(max_tokens=max_tokens),
            arrival=cluster.driver.clock(),
        )

    return make


async def collect(cluster, request) -> list[int]:
    tokens: list[int] = []
    async with cluster.generate(request) as generation:
        async for generated in generation:
            tokens.extend(generated.tokens)
    return tokens


def outcomes(cluster) -> list[tuple[int, str]]:
    return [(each.attempt.number, each.outcome) for each in cluster.ended]


async def test_tokens_come_as_they_are_delivered(cluster, ask, wait_until):
    cluster.manual = True
    async with cluster.generate(ask()) as generation:
        results = aiter(generation)
        first = asyncio.create_task(anext(results))
        await wait_until(lambda: bool(cluster.started))
        attempt = AttemptId("r", 1)
        cluster.deliver(Output(attempt=attempt, tokens=(1,), sources=Sources(computed=3)))
        assert await first == Generated((1,))
        cluster.deliver(Output(attempt=attempt, tokens=(2, 3)))
        cluster.deliver(Output(attempt=attempt, outcome="finished", finish_reason="stop"))
        assert [each async for each in results] == [Generated((2, 3)), Generated((), "stop")]
        assert generation.usage.completion_tokens == 3
    assert outcomes(cluster) == [(1, "finished")]
    assert cluster.cancelled == []
    assert cluster.idle


@pytest.mark.parametrize("outcome", ["failed", "retracted", "refused"])
async def test_an_attempt_that_ends_early_is_not_seen(cluster, ask, outcome):
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome=outcome, message="trouble")
    assert await collect(cluster, ask()) == [1, 2, 3, 4, 5, 6]
    assert outcomes(cluster) == [(1, outcome), (2, "finished")]
    assert cluster.idle


async def test_a_dead_worker_is_not_seen(cluster, ask, wait_until):
    cluster.gates[3] = asyncio.Event()
    running = asyncio.create_task(collect(cluster, ask()))
    await wait_until(lambda: cluster.driver.count_running() == 1)
    cluster.gates[2] = asyncio.Event()
    cluster.dead.add(DECODE)
    cluster.driver.worker_lost(OTHER)  # not ours
    cluster.driver.worker_lost(DECODE)
    for gate in cluster.gates.values():
        gate.set()
    assert await running == [1, 2, 3, 4, 5, 6]
    assert outcomes(cluster) == [(1, "failed"), (2, "finished")]
    assert cluster.placed[1].avoid == (DECODE,)


async def test_a_worker_that_cannot_be_reached(cluster, ask):
    cluster.dead.add(DECODE)
    assert await collect(cluster, ask()) == [1, 2, 3, 4, 5, 6]
    assert outcomes(cluster) == [(1, "failed"), (2, "finished")]


async def test_a_submit_that_fails_later(cluster, ask, wait_until):
    cluster.manual = True
    running = asyncio.create_task(collect(cluster, ask()))
    await wait_until(lambda: bool(cluster.started))
    cluster.driver.submit_failed(AttemptId("other", 1), "unknown request")
    cluster.manual = False
    cluster.driver.submit_failed(AttemptId("r", 1), "connection reset")
    assert await running == [1, 2, 3, 4, 5, 6]


async def test_every_attempt_fails(cluster, ask):
    cluster.config = validate_config({"max_attempts": 2})
    cluster.driver.config = cluster.config
    cluster.dead.update({DECODE, OTHER})
    with pytest.raises(AttemptsExhausted, match="2 attempts failed"):
        await collect(cluster, ask())
    assert outcomes(cluster) == [(1, "failed"), (2, "failed")]
    assert cluster.idle


async def test_a_coordinator_that_restarts_is_asked_again(cluster, ask):
    cluster.place_answers = [Unavailable("restarting"), Unavailable("restarting")]
    assert await collect(cluster, ask()) == [1, 2, 3, 4, 5, 6]
    assert [each.attempt.number for each in cluster.placed] == [1, 1, 1]


async def test_a_broken_link_is_an_answer(cluster, ask, caplog):
    cluster.place_answers = [ZeroDivisionError("bug")]
    with pytest.raises(Unavailable, match="ZeroDivisionError: bug"):
        await collect(cluster, ask())
    assert cluster.idle


async def test_rejection(cluster, ask):
    cluster.place_answers = [
        Rejection(
            attempt=AttemptId("r", 1),
            status=429,
            reason="queue_full",
            message="full",
            retry_after_s=3.0,
        )
    ]
    with pytest.raises(Overloaded, match="full") as caught:
        await collect(cluster, ask())
    assert caught.value.retry_after == 3.0
    assert outcomes(cluster) == []


async def test_leaving_while_placing_withdraws_case_2(cluster, ask, wait_until):
    cluster.place_gate = asyncio.Event()
    async with cluster.generate(ask()):
        await wait_until(lambda: bool(cluster.placed))
        assert cluster.driver.count_waiting() == 1
    assert outcomes(cluster) == [(1, "aborted")]
    await wait_until(lambda: cluster.forgotten == [AttemptId("r", 1)])
    assert cluster.started == []
    assert cluster.idle


async def test_leaving_while_running_cancels(cluster, ask, wait_until):
    cluster.manual = True
    async with cluster.generate(ask()):
        await wait_until(lambda: bool(cluster.started))
    assert cluster.cancelled == [AttemptId("r", 1)]
    assert cluster.driver.count_running() == 1  # until the worker has confirmed
    assert outcomes(cluster) == []
    cluster.deliver(Output(attempt=AttemptId("r", 1), outcome="aborted"))
    assert outcomes(cluster) == [(1, "aborted")]
    assert cluster.idle


async def test_a_cancel_that_reaches_nobody(cluster, ask, wait_until):
    cluster.manual = True
    async with cluster.generate(ask()):
        await wait_until(lambda: bool(cluster.started))
        cluster.dead.add(DECODE)
    assert outcomes(cluster) == [(1, "aborted")]
    assert cluster.idle


async def test_a_cancel_that_nobody_confirms(cluster, ask, wait_until):
    cluster.driver.config = validate_config({"timeouts": {"drain_s": 0.01}})
    cluster.manual = True
    async with cluster.generate(ask()):
        await wait_until(lambda: bool(cluster.started))
    await wait_until(lambda: cluster.idle)
    assert outcomes(cluster) == [(1, "aborted")]


@pytest.mark.parametrize("waiting", [True, False])
async def test_deadline(cluster, ask, waiting):
    cluster.driver.config = validate_config({"timeouts": {"request_s": 0.02}})
    cluster.place_gate = asyncio.Event() if waiting else None
    cluster.gates[1] = asyncio.Event()
    with pytest.raises(DeadlineExceeded) as caught:
        await collect(cluster, ask())
    assert ("while placing" if waiting else "running, attempt 1, 1 tokens") in str(caught.value)
    assert outcomes(cluster) == [(1, "aborted")]
    assert cluster.idle


async def test_stop_ends_without_abort(cluster, ask):
    cluster.gates[2] = asyncio.Event()
    async with cluster.generate(ask()) as generation:
        results = aiter(generation)
        await anext(results)
        await anext(results)
        generation.stop()
        assert await anext(results) == Generated((), "stop")
        with pytest.raises(StopAsyncIteration):
            await anext(results)
    assert cluster.cancelled == [AttemptId("r", 1)]
    text = cluster.metrics.render().decode()
    assert 'pd_request_total{finish_reason="stop",model="tiny"} 1.0' in text
    assert 'pd_request_total{finish_reason="abort",model="tiny"} 0.0' in text


async def test_close_answers_everybody(cluster, ask, wait_until):
    cluster.gates[1] = asyncio.Event()
    running = [asyncio.create_task(collect(cluster, ask(f"r{i}"))) for i in range(3)]
    await wait_until(lambda: cluster.driver.count_running() == 3)
    cluster.driver.close()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in results)
    assert {str(each) for each in results} == {"the gateway is shutting down"}
    assert cluster.idle


async def test_a_request_that_is_over_is_forgotten(cluster, ask):
    """Not kept until its deadline, ten minutes away."""
    generation = cluster.generate(ask())
    async with generation:
        async for _ in generation:
            pass
    forgotten = weakref.ref(generation)
    del generation
    await asyncio.sleep(0)
    gc.collect()
    assert forgotten() is None


async def test_late_outputs_of_unknown_requests_are_dropped(cluster, ask):
    cluster.deliver(Output(attempt=AttemptId("nobody", 1), tokens=(1,)))
    assert await collect(cluster, ask()) == [1, 2, 3, 4, 5, 6]
    cluster.deliver(Output(attempt=AttemptId("r", 1), tokens=(1,)))
    assert cluster.idle


async def test_our_bug_is_an_answer(cluster, ask, caplog):
    cluster.gates[1] = asyncio.Event()
    async with cluster.generate(ask()) as generation:
        results = aiter(generation)
        await anext(results)
        generation.feed(Started())
        with pytest.raises(RequestError, match="internal error"):
            await anext(results)
    assert "no transition" in caplog.text


async def test_many_at_once_leave_nothing(cluster, ask):
    """Cases 3 and 4: aborts that race with everything."""

    async def one(index: int) -> None:
        with suppress(asyncio.CancelledError):
            task = asyncio.create_task(collect(cluster, ask(f"r{index}")))
            for _ in range(index % 17):
                await asyncio.sleep(0)
            task.cancel()
            await task

    await asyncio.gather(*(one(index) for index in range(300)))
    assert cluster.idle
    placed = {each.attempt for each in cluster.placed}
    assert {each.attempt for each in cluster.ended} >= placed


@pytest.mark.parametrize("page_size", [1, 128])
async def test_placement_is_told_of_all_tokens_in_whole_blocks(cluster, ask, page_size):
    """Of the request's namespace, and with what an earlier attempt has given."""
    cluster.driver.config = validate_config({"page_size": page_size, "max_total_tokens": 4096})
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    request = dataclasses.replace(ask(), prompt=tuple(range(125)), namespace="mine")
    await collect(cluster, request)
    first, second = (unpack_hashes(each.blocks) for each in cluster.placed)
    block = max(64, page_size)
    hashes = block_hashes(np.array([*range(125), 1, 2, 3], np.int32), block, "mine").tolist()
    assert len(hashes) == 128 // block
    assert first == hashes[:-1]
    assert second == hashes
