"""A prompt whose logprobs are wanted is computed whole, on prefill, whatever the caches hold."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.draw import unpack_scores
from pd_cluster.types import AttemptId, Route, Sources
from pd_cluster.worker.prefill import SCORED_TOKENS
from tests.worker.harness import World, expected_answer
from tests.worker.test_scheduler import ROUTES, finish, prompt_of, sources


def scores(world: World, attempt: AttemptId) -> list[int]:
    """The tokens that were scored: the harness gives each its id as its logprob."""
    first, *others = [each for each in world.outputs[attempt] if each.tokens]
    assert first.prompt_scores is not None
    assert all(each.prompt_scores is None for each in others)
    return [int(each) for each in unpack_scores(first.prompt_scores).logprobs]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 90])
def test_cold_and_warm_by_every_route(page_size: int, length: int, route: Route) -> None:
    world = World.make(length, page_size=page_size, chunk=32)
    prompt = prompt_of(length)
    expected = expected_answer(prompt, 8)
    written = []
    for name in ("a", "b"):
        attempt = world.request(prompt, name=name, prompt_logprobs=0, route=route)
        finish(world)
        assert scores(world, attempt) == prompt[1:].tolist()
        assert world.answer(attempt) == expected
        assert sources(world, attempt) == Sources(computed=length)
        written.append(world.worker("prefill-0").scheduler.prefill.written_pages)
    # Decode's resident pages are not sent again all the same.
    assert written[1] - written[0] == (1 if length % page_size else 0)
    assert world.worker("decode-0").scheduler.decode.computed_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_among_others_that_share_its_prefix(seed: int) -> None:
    """In a crowd that publishes, evicts and waits for the same pages."""
    world = World.make(seed, pages=400, page_size=4, chunk=16)
    shared = prompt_of(70, seed)
    plain, scored = [], []
    for number in range(12):
        prompt = np.concatenate([shared, prompt_of(number, 100 + number)])
        attempt = world.request(
            prompt,
            name=f"r{number}",
            prompt_logprobs=0 if number % 2 else -1,
            route=ROUTES[number % 3],
        )
        (scored if number % 2 else plain).append((attempt, prompt))
    finish(world)
    for attempt, prompt in scored:
        if world.outcome(attempt) == "finished":
            assert scores(world, attempt) == prompt[1:].tolist()
            assert sources(world, attempt).cached == 0
    done = [each for each, _ in (*plain, *scored) if world.outcome(each) == "finished"]
    assert len(done) >= 4
    for attempt, prompt in plain:
        if attempt in done:
            assert world.answer(attempt) == expected_answer(prompt, 8)


def test_a_resumed_attempt_scores_nothing() -> None:
    """The client has the scores since its first token."""
    world = World.make(0)
    prompt = prompt_of(40)
    sent = expected_answer(prompt, 3)
    attempt = world.request(prompt, name="a", number=1, sent=sent, prompt_logprobs=0)
    finish(world)
    assert all(each.prompt_scores is None for each in world.outputs[attempt])
    assert sent + world.answer(attempt) == expected_answer(prompt, 8)


def test_few_logits_are_held_at_once() -> None:
    world = World.make(0, pages=4000, chunk=10_000)
    for name in ("a", "b"):
        world.request(prompt_of(700, seed=ord(name)), name=name, prompt_logprobs=0)
    world.request(prompt_of(700), name="c")
    prefill = world.worker("prefill-0").scheduler
    most = 0
    plan = prefill.plan

    def watched(now: float):  # type: ignore[no-untyped-def]
        nonlocal most
        batch, out = plan(now)
        if batch is not None:
            known = [row for row in batch.rows if row.known is not None]
            most = max(most, sum(row.num_logits for row in known))
        return batch, out

    prefill.plan = watched  # type: ignore[method-assign]
    finish(world)
    assert 0 < most <= SCORED_TOKENS
