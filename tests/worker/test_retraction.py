"""Whose pages a decode worker takes back, how many, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.types import (
    MAX_RETRACTIONS,
    AttemptId,
    MakeRoom,
    RetractionPolicy,
    SamplingParams,
    StartAttempt,
    pack_ints,
)
from pd_cluster.worker.decode import DecodeSequences
from pd_cluster.worker.page_table import freed_by
from pd_cluster.worker.retraction import in_order
from pd_cluster.worker.sequence import Sequence
from tests.worker.harness import World, expected_answer
from tests.worker.test_cases import until
from tests.worker.test_scheduler import finish, prompt_of


def decode_of(world: World) -> DecodeSequences:
    return world.worker("decode-0").scheduler.decode


def start(world: World, name: str, length: int, seed: int = 1, **changes: int) -> AttemptId:
    """A sequence that runs, and has no end of its own for a long while."""
    attempt = world.request(
        prompt_of(length, seed=seed),
        name=name,
        max_tokens=changes.pop("max_tokens", 500),
        ignore_eos=True,
        **changes,  # type: ignore[arg-type]
    )
    until(world, "running", attempt)
    return attempt


def retracted(world: World) -> str:
    """The names of those that were, in order."""
    ended = [attempt for attempt in world.outputs if world.outcome(attempt) == "retracted"]
    return "".join(attempt.request for attempt in ended)


def step(world: World) -> None:
    """One step of decode, whatever else could happen."""
    world._compute(world.worker("decode-0"))
    world.validate()


@pytest.mark.parametrize(("policy", "order"), [("length", "dcab"), ("priority", "bdca")])
def test_each_policy_has_its_order(policy: RetractionPolicy, order: str) -> None:
    """Fewest output tokens, the longest prompt of equals; before that, the lowest priority."""
    world = World.make(1, pages=4000)
    lives = {"a": (20, 1, 40), "b": (10, 0, 50), "c": (20, 1, 30), "d": (30, 1, 30)}
    for seed, (name, (length, priority, _)) in enumerate(lives.items()):
        start(world, name, length, seed, priority=priority)
    sequences = decode_of(world).sequences
    for attempt, seq in sequences.items():
        while seq.num_output < lives[attempt.request][2]:
            seq.append(1)
    found = in_order(policy, sequences.values())
    assert "".join(seq.attempt.request for seq in found) == order


def test_who_was_retracted_often_comes_last() -> None:
    """Never the same one for ever: though it has the fewest tokens and the lowest priority."""
    world = World.make(1, pages=4000)
    start(world, "a", 20, retractions=MAX_RETRACTIONS, priority=-1)
    start(world, "b", 20, seed=2, retractions=MAX_RETRACTIONS - 1)
    for policy in ("length", "priority"):
        found = in_order(policy, decode_of(world).sequences.values())
        assert [seq.attempt.request for seq in found] == ["b", "a"]


@pytest.mark.parametrize("policy", ["length", "priority"])
def test_as_many_go_as_it_takes_and_never_all(policy: RetractionPolicy) -> None:
    world = World.make(3, pages=120)
    decode = decode_of(world)
    decode.retraction_policy = policy
    attempts = [start(world, str(index), 12, seed=index) for index in range(3)]
    while not retracted(world):
        step(world)
    assert decode.retractions == {policy: 1}, "one's pages were enough"
    assert decode.retracted_tokens >= 12
    while decode.count("running") > 1:
        step(world)
    assert decode.retractions == {policy: 2}
    survivor = next(iter(decode.sequences))
    step(world)
    assert decode.count("running") == 1
    for attempt in attempts:
        tokens = world.answer(attempt)
        seed = attempts.index(attempt)
        assert tokens == expected_answer(prompt_of(12, seed=seed), len(tokens), ignore_eos=True)
        assert (world.outcome(attempt) == "retracted") == (attempt != survivor)


def test_a_victim_whose_pages_are_all_shared_frees_nothing_and_is_passed_over() -> None:
    world = World.make(4, pages=100)
    worker = world.worker("decode-0")
    decode, cache = decode_of(world), worker.cache
    world.request(prompt_of(40), name="before", max_tokens=1)
    world.run()  # its prompt is in the tree

    def sequence(name: str, length: int) -> Sequence:
        request = StartAttempt(
            attempt=AttemptId(name, 0),
            gateway="gateway-0",
            prefill=worker.id,
            tokens=pack_ints(prompt_of(length)),
            prompt_len=length,
            params=SamplingParams(max_tokens=9),
            timeout_s=9.0,
        )
        seq = Sequence(request, cache, 0.0)
        seq.table.claim(seq.start, None, now=0.0, compute_last=False)
        return seq

    whole, again, longer = sequence("a", 40), sequence("b", 40), sequence("c", 45)
    tables = [whole.table, again.table, longer.table]
    assert [freed_by([table]) for table in tables] == [0, 0, 5]
    assert (freed_by(tables[:2]), freed_by(tables)) == (0, 45)
    for seq, tokens in ((longer, 9), (again, 5)):
        for _ in range(tokens):
            seq.append(1)
    running = [whole, again, longer]
    assert in_order("length", running) == running
    assert decode._victim(running, short=[]) is longer
    assert decode._victim(running, short=[again]) is again, "it needs a page no longer"
    for table in tables:
        table.close()
    finish(world)


def test_the_last_one_that_cannot_fit_alone_fails_with_a_clear_error() -> None:
    world = World.make(5, pages=16)
    attempt = world.request(prompt_of(10), name="a", max_tokens=40, ignore_eos=True)
    finish(world)
    assert world.outcome(attempt) == "failed"
    message = world.outputs[attempt][-1].message
    assert "17 tokens do not fit into the 16 of decode-0@i0, even alone" in message
    assert world.answer(attempt) == expected_answer(prompt_of(10), 7, ignore_eos=True)


def test_one_that_runs_alone_waits_for_pages_that_come_back() -> None:
    """It is neither retracted nor failed while an aborted one's pages are still in flight."""
    world = World.make(6, pages=64)
    decode, cache = decode_of(world), world.worker("decode-0").cache
    alone = start(world, "a", 30)
    world.request(prompt_of(15, seed=2), name="b", max_tokens=5, ignore_eos=True)
    world._do("mail", world.worker("decode-0"))
    assert cache.counts().in_flight == 15
    while cache.available():
        step(world)
    step(world)
    assert world.outcome(alone) is None
    assert not decode.retractions


# --- what the coordinator asks for ---


def crowd(world: World, count: int = 4, **changes: int) -> dict[AttemptId, int]:
    attempts = [
        start(world, chr(ord("a") + index), 20, seed=index, **changes) for index in range(count)
    ]
    return dict.fromkeys(attempts, 0)


def make_room(world: World, tokens: int, candidates: dict[AttemptId, int]) -> str:
    message = MakeRoom(tokens=tokens, candidates=tuple(candidates.items()))
    world.worker("decode-0").mailbox.append(message)
    while world.worker("decode-0").mailbox:
        world._do("mail", world.worker("decode-0"))
    world.validate()
    return retracted(world)


def test_room_is_made_by_as_few_as_are_enough() -> None:
    world = World.make(7, pages=200)
    candidates = crowd(world)
    available = world.worker("decode-0").cache.available()
    gone = make_room(world, available + 25, candidates)
    assert len(gone) == 2
    assert decode_of(world).retractions == {"preemption": 2}
    assert world.worker("decode-0").cache.available() >= available + 25


def test_only_those_go_that_the_coordinator_named() -> None:
    world = World.make(8, pages=200)
    named = list(crowd(world))[2]
    available = world.worker("decode-0").cache.available()
    unknown = AttemptId("gone", 0)
    assert make_room(world, available + 10, {named: 0, unknown: 0}) == named.request


def test_none_goes_where_all_would_not_be_enough_or_none_need_to() -> None:
    world = World.make(9, pages=200)
    candidates = crowd(world)
    assert make_room(world, 5000, candidates) == ""
    available = world.worker("decode-0").cache.available()
    assert make_room(world, available, candidates) == ""


def test_what_was_set_aside_for_growth_counts_as_room() -> None:
    world = World.make(10, pages=200)
    candidates = dict.fromkeys(crowd(world), 30)
    available = world.worker("decode-0").cache.available()
    assert len(make_room(world, available + 45, candidates)) == 1


def test_a_place_among_those_that_run_is_room_too() -> None:
    world = World.make(11, pages=400, max_running=3)
    candidates = crowd(world, count=3)
    assert len(make_room(world, 10, candidates)) == 1
    start(world, "new", 10, seed=9)


@pytest.mark.parametrize("state", ["reserved", "landing", "computing"])
def test_one_whose_prompt_is_on_its_way_goes_too(state: str) -> None:
    """Its pages come back once nothing can land in them any more."""
    for seed in range(20):
        world = World.make(seed, pages=200, chunk=5)
        prompt = prompt_of(60, seed=1)
        route = "local" if state == "computing" else "remote"
        attempt = world.request(prompt, name="a", max_tokens=500, ignore_eos=True, route=route)
        sequences = decode_of(world).sequences
        while attempt not in sequences or sequences[attempt].state not in (state, "running"):
            assert world.step()
        if sequences[attempt].state == "running":
            continue  # by chance the pages came before the first token
        assert make_room(world, 190, {attempt: 0}) == "a"
        sent = world.answer(attempt)
        again = world.request(prompt, name="a", number=1, sent=sent, max_tokens=8, ignore_eos=True)
        finish(world)
        assert sent + world.answer(again) == expected_answer(prompt, 8, ignore_eos=True)
        assert world.worker("decode-0").cache.available() == 200
        return
    raise AssertionError(f"never {state}")


def test_an_abort_of_a_retracted_request_leaves_nothing() -> None:
    """Case 6: neither pages nor locks, on either side."""
    world = World.make(12, pages=200)
    candidates = crowd(world, count=1)
    assert make_room(world, 190, candidates) == "a"
    finish(world)
    for worker in world.workers:
        worker.cache.reset()
        assert worker.cache.counts().free == 200
    assert np.all(worker.cache.counts().protected == 0)
