"""Behaviours in which comparable systems were reported to fail, at the level of the schedulers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pd_cluster.types import AttemptId, CancelAttempt, Sources
from tests.worker.harness import VOCAB, FakeWorker, World, expected_answer
from tests.worker.test_scheduler import finish, prompt_of, sources


def reaches(world: World, state: str, attempt: AttemptId) -> bool:
    """Lets things happen until the sequence is in this state, or nothing more can happen."""
    decode = world.worker("decode-0").scheduler.decode
    while True:
        sequence = decode.sequences.get(attempt)
        if sequence is not None and sequence.state == state:
            return True
        if not world.step():
            return False


def until(world: World, state: str, attempt: AttemptId) -> None:
    assert reaches(world, state, attempt), f"{attempt} never was {state}"


def test_a_short_prompt_is_not_held_up_by_a_cancelled_long_one() -> None:
    """Case 1: the prefill stops within a chunk."""
    world = World.make(1, chunk=10)
    long = world.request(prompt_of(300), name="long")
    until(world, "reserved", long)
    while world.worker("prefill-0").scheduler.prefill.computed_tokens < 20:
        world.step()
    world.worker("decode-0").mailbox.append(CancelAttempt(attempt=long))
    short = world.request(prompt_of(5, seed=2), name="short")
    finish(world)
    assert world.answer(short) == expected_answer(prompt_of(5, seed=2), 8)
    assert world.worker("prefill-0").scheduler.prefill.computed_tokens < 300


@pytest.mark.parametrize("state", ["reserved", "landing", "running"])
def test_a_cancel_in_every_state_returns_both_pools_to_the_baseline(state: str) -> None:
    """Cases 2, 3 and 8."""
    cancelled = 0
    for seed in range(20):
        world = World.make(seed)
        attempt = world.request(prompt_of(60), name="a", max_tokens=200, ignore_eos=True)
        if not reaches(world, state, attempt):
            continue  # by chance the pages came before the first token
        world.worker("decode-0").mailbox.append(CancelAttempt(attempt=attempt))
        finish(world)
        cancelled += world.outcome(attempt) == "aborted"
        for worker in world.workers:
            worker.cache.reset()
            assert worker.cache.counts().free == 400
    assert cancelled >= 5


def test_more_cancels_in_the_transfer_phase_than_the_pool_has_pages() -> None:
    """Case 4."""
    world = World.make(4, pages=64)
    for index in range(80):
        attempt = world.request(prompt_of(20, seed=index), name=str(index))
        while not world.transfers:
            assert world.step()
        world.worker("decode-0").mailbox.append(CancelAttempt(attempt=attempt))
        world.run()
    served = world.request(prompt_of(20, seed=999), name="served")
    finish(world)
    assert world.answer(served) == expected_answer(prompt_of(20, seed=999), 8)


def test_a_transfer_that_never_ends_fails_by_its_deadline_and_the_next_works() -> None:
    """Case 7: the pages stay in flight until the stopped peer is known dead, and are freed then."""
    world = World.make(7, prefill=2)
    decode = world.worker("decode-0")
    stuck = world.request(prompt_of(40), name="stuck", timeout_s=1000)
    while not world.transfers:
        assert world.step()
    stopped = world.worker("prefill-0")
    hung = list(world.transfers)  # neither they nor the stopped worker do anything any more
    late = world.now + 2000
    world._obey(decode, decode.scheduler.tick(late))
    assert world.outcome(stuck) == "failed"
    assert decode.cache.counts().in_flight == 40
    healthy = world.request(prompt_of(40, seed=2), name="healthy", prefill="prefill-1")
    for _ in range(2000):
        if world.outcome(healthy):
            break
        possible = [each for each in _possible(world) if each[1] not in (stopped, *hung)]
        world._do(*possible[0])
    assert world.answer(healthy) == expected_answer(prompt_of(40, seed=2), 8)
    assert decode.cache.counts().in_flight == 40
    world.kill(stopped)
    finish(world)
    assert decode.cache.counts().in_flight == 0


def test_a_prompt_that_decode_holds_whole_moves_no_page_and_ends() -> None:
    """Case 10."""
    world = World.make(10, page_size=4)
    prompt = prompt_of(32)
    world.request(prompt, name="a")
    world.run()
    written = world.worker("prefill-0").scheduler.prefill.written_pages
    again = world.request(prompt, name="b")
    finish(world)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == written
    assert world.outputs[again][0].resident == 32
    assert world.answer(again) == expected_answer(prompt, 8)


def test_a_pool_of_seven_pages_serves_both() -> None:
    """Case 13: one needs 4 then 1 more, the other 3 then 1 more."""
    world = World.make(13, pages=7)
    prompts = {"a": prompt_of(4, seed=1), "b": prompt_of(3, seed=2)}
    unfinished = dict.fromkeys(prompts, (0, [0][:0]))
    for _ in range(20):
        asked = {
            name: world.request(
                prompts[name], name=name, number=number, sent=sent, max_tokens=2, ignore_eos=True
            )
            for name, (number, sent) in unfinished.items()
        }
        world.run()
        for name, attempt in asked.items():
            number, sent = unfinished[name]
            sent = sent + world.answer(attempt)
            unfinished[name] = (number + 1, sent)
            if world.outcome(attempt) == "finished":
                assert sent == expected_answer(prompts[name], 2, ignore_eos=True)
                del unfinished[name]
        if not unfinished:
            break
    assert not unfinished
    finish(world)


def test_demand_equal_to_capacity_is_served() -> None:
    """Case 14."""
    world = World.make(14, pages=64)
    attempt = world.request(prompt_of(55), name="a", max_tokens=10, ignore_eos=True)
    finish(world)
    assert world.answer(attempt) == expected_answer(prompt_of(55), 10, ignore_eos=True)


def test_demand_above_an_empty_pool_is_refused_at_once() -> None:
    """Case 14."""
    world = World.make(14, pages=64)
    attempt = world.request(prompt_of(65), name="a")
    finish(world)
    assert world.outcome(attempt) == "refused"
    assert "65" in world.outputs[attempt][0].message


def test_cached_tokens_do_not_depend_on_decode() -> None:
    """Case 19: the same accounts with decode's cache on and off."""
    accounts = []
    for keep in (True, False):
        world = World.make(19)
        seen: list[Sources] = []
        for index, length in enumerate((30, 30, 20, 45)):
            attempt = world.request(prompt_of(45)[:length], name=str(index))
            world.run()
            seen.append(sources(world, attempt))
            if not keep:
                world.worker("decode-0").cache.reset()
        accounts.append(seen)
        assert seen[0].cached == 0
        assert all(each.cached < each.cached + each.computed for each in seen)
    assert accounts[0] == accounts[1]


def test_refused_and_repeated_reservations_are_no_cache_queries() -> None:
    """Case 20."""
    world = World.make(20, pages=64)
    decode = world.worker("decode-0")
    running = world.request(prompt_of(40), name="a", max_tokens=20, ignore_eos=True)
    until(world, "running", running)
    before = decode.cache.statistics().queries
    for number in range(5):
        refused = world.request(prompt_of(30, seed=2), name="b", number=number)
        world._do("mail", decode)
        assert world.outcome(refused) == "refused"
    assert decode.cache.statistics().queries == before
    finish(world)


def test_the_transfer_deadline_starts_with_the_first_token() -> None:
    """Case 24: waiting in prefill's queue does not use it up."""
    world = World.make(24)
    decode = world.worker("decode-0")
    decode.scheduler.decode.transfer_s = 5.0
    attempt = world.request(prompt_of(30), name="a")
    until(world, "reserved", attempt)
    world._obey(decode, decode.scheduler.tick(world.now + 1000))
    assert world.outcome(attempt) is None
    while decode.scheduler.decode.count("reserved"):
        choices = [choice for choice in _possible(world) if choice[0] != "land"]
        world._do(*choices[0])
    assert decode.scheduler.decode.count("landing")
    world._obey(decode, decode.scheduler.tick(world.now + 4))
    assert world.outcome(attempt) is None
    world._obey(decode, decode.scheduler.tick(world.now + 6))
    assert world.outcome(attempt) == "failed"
    finish(world)


def test_exact_counts() -> None:
    """Case 26: one token, many tokens, a one-token prompt, and no end before `max_tokens`."""
    world = World.make(26)
    for index, (length, count) in enumerate(((1, 1), (1, 50), (20, 1), (20, 100))):
        prompt = prompt_of(length, seed=index)
        attempt = world.request(prompt, name=str(index), max_tokens=count, ignore_eos=True)
        world.run()
        assert len(world.answer(attempt)) == count
        assert world.answer(attempt) == expected_answer(prompt, count, ignore_eos=True)
    finish(world)


def _possible(world: World) -> list[tuple[str, FakeWorker | object]]:
    choices: list[tuple[str, FakeWorker | object]] = [
        ("mail", w) for w in world.workers if w.mailbox
    ]
    choices += [("land", transfer) for transfer in world.transfers]
    choices += [
        ("compute", worker)
        for worker in world.workers
        if worker.scheduler.prefill.jobs or worker.scheduler.decode.count("running")
    ]
    return choices


def test_random_tokens_are_in_the_vocabulary() -> None:
    """The helper that the tests above lean on."""
    rng = random.Random(0)
    answer = expected_answer(np.array([rng.randrange(1, VOCAB)], np.int32), 100, ignore_eos=True)
    assert all(0 <= token < VOCAB for token in answer)


def test_a_cancelled_local_prompt_copies_nothing_into_pages_that_others_got() -> None:
    """It was to begin with a private copy of the page that holds its last token."""
    world = World.make(0, pages=16, page_size=4)
    decode = world.worker("decode-0")
    prompt = np.arange(1, 9, dtype=np.int32)
    world.request(prompt, name="first", max_tokens=2)
    world.run()
    again = world.request(prompt, name="again", max_tokens=2, route="local")
    world._do("mail", decode)
    decode.mailbox.append(CancelAttempt(attempt=again))
    other = world.request(prompt + 20, name="other", max_tokens=2, route="local")
    world._do("mail", decode)
    world._do("mail", decode)
    batch, _ = decode.scheduler.plan(world.now)
    assert batch is not None
    assert [row.attempt for row in batch.rows] == [other]
    assert not batch.copies
