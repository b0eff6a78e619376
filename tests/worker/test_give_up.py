"""A worker that is to leave sends its work away; others do it, with the same tokens."""

from __future__ import annotations

import pytest

from tests.worker.harness import World, expected_answer
from tests.worker.test_cases import reaches
from tests.worker.test_scheduler import finish, prompt_of

TOKENS = 40


@pytest.mark.parametrize("state", ["reserved", "landing", "running"])
def test_decode_gives_up_in_every_state(state: str) -> None:
    prompt, seen = prompt_of(60), 0
    for seed in range(20):
        world = World.make(seed, decode=2)
        first = world.request(prompt, name="a", max_tokens=TOKENS, ignore_eos=True)
        if not reaches(world, state, first):
            continue  # by chance the pages came before the first token
        leaving = world.worker("decode-0")
        world._obey(leaving, leaving.scheduler.give_up(world.now))
        assert leaving.scheduler.give_up(world.now) == []
        finish(world)
        assert leaving.scheduler.idle
        assert world.outcome(first) == "retracted"
        sent = world.answer(first)
        again = world.request(
            prompt, name="a", number=1, sent=sent, max_tokens=TOKENS, ignore_eos=True,
            decode="decode-1",
        )  # fmt: skip
        finish(world)
        assert sent + world.answer(again) == expected_answer(prompt, TOKENS, ignore_eos=True)
        seen += 1
    assert seen >= 5


def test_an_attempt_that_has_ended_is_let_be() -> None:
    for seed in range(20):
        world = World.make(seed)
        attempt = world.request(prompt_of(60), name="a", max_tokens=1, ignore_eos=True)
        leaving = world.worker("decode-0")
        if not reaches(world, "closing", attempt):
            continue
        assert leaving.scheduler.give_up(world.now) == []
        finish(world)
        assert world.outcome(attempt) == "finished"
        return
    raise AssertionError("never seen")


def test_prefill_gives_up_and_decode_hears_it() -> None:
    for steps in range(0, 30, 3):
        world = World.make(steps, chunk=8)
        attempt = world.request(prompt_of(60), name="a", max_tokens=TOKENS, ignore_eos=True)
        for _ in range(steps):
            world.step()
        leaving = world.worker("prefill-0")
        had = len(leaving.scheduler.prefill.jobs)
        world._obey(leaving, leaving.scheduler.give_up(world.now))
        finish(world)
        assert leaving.scheduler.idle
        # Either it was early enough to be stopped, or the first token was out already.
        assert world.outcome(attempt) in (("failed", "finished") if had else ("finished",))
        if world.outcome(attempt) == "finished":
            assert world.answer(attempt) == expected_answer(prompt_of(60), TOKENS, ignore_eos=True)
