"""The coordinator's decisions, in virtual time."""

from __future__ import annotations

import random

import pytest

from pd_cluster.config import Config
from pd_cluster.coordinator.state import Answer, CoordinatorState
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    Outcome,
    Placement,
    PlaceRequest,
    Rejection,
    Role,
    WorkerId,
    WorkerReport,
)

SIGNATURE = {"model": "m", "page_size": "1"}


def report(name: str, incarnation: str = "a", **changes: object) -> WorkerReport:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    fields: dict[str, object] = {
        "worker": WorkerId(name, incarnation),
        "role": role,
        "signature": SIGNATURE,
        "capacity": 1000,
        "available": 1000,
        "running": 0,
        "waiting": 0,
        **changes,
    }
    return WorkerReport(**fields)  # type: ignore[arg-type]


def request(name: str, number: int = 0, **changes: object) -> PlaceRequest:
    fields: dict[str, object] = {
        "attempt": AttemptId(name, number),
        "gateway": "gateway-0",
        "prompt_len": 10,
        "max_tokens": 10,
        "timeout_s": 100.0,
        **changes,
    }
    return PlaceRequest(**fields)  # type: ignore[arg-type]


def cluster(prefill: int = 1, decode: int = 1, **settings: object) -> CoordinatorState:
    state = CoordinatorState(Config.model_validate(settings))
    for index in range(prefill):
        state.report(report(f"prefill-{index}"), 0.0)
    for index in range(decode):
        state.report(report(f"decode-{index}"), 0.0)
    return state


def ended(name: str, outcome: Outcome = "finished", number: int = 0) -> AttemptEnded:
    return AttemptEnded(attempt=AttemptId(name, number), outcome=outcome)


def placement(answers: list[Answer]) -> Placement:
    assert len(answers) == 1
    assert isinstance(answers[0].reply, Placement)
    return answers[0].reply


def rejection(answers: list[Answer]) -> Rejection:
    assert len(answers) == 1
    assert isinstance(answers[0].reply, Rejection)
    return answers[0].reply


def test_no_worker_is_an_explicit_503() -> None:
    """Case 21."""
    state = cluster()
    state.worker_lost(WorkerId("prefill-0", "a"), 0.0)
    refused = rejection(state.place(request("a"), 0.0))
    assert refused.status == 503
    assert refused.retry_after_s
    assert "no prefill worker" in refused.message


def test_who_comes_before_the_workers_is_placed_when_they_have_reported() -> None:
    """As after a restart of the coordinator."""
    state = cluster(prefill=0, decode=0)
    for name in "abc":
        assert state.place(request(name), 0.0) == []
    assert state.place(request("a"), 0.5) == []  # asked again
    assert state.place(request("huge", prompt_len=2000), 0.5) == []
    state.ended(AttemptEnded(attempt=AttemptId("b", 0), outcome="aborted"), 0.6)
    assert state.report(report("decode-0"), 1.0)[1] == []
    answers = state.report(report("prefill-0"), 1.1)[1]
    placed = [each.attempt.request for each in answers if isinstance(each.reply, Placement)]
    assert placed == ["a", "c"]
    (refused,) = [each.reply for each in answers if isinstance(each.reply, Rejection)]
    assert (refused.attempt.request, refused.reason) == ("huge", "never_fits")
    state.validate()


def test_workers_that_never_come_are_not_waited_for_long() -> None:
    state = cluster(prefill=0)
    assert state.place(request("a"), 10.0) == []
    assert state.tick(14.9) == []
    refused = rejection(state.tick(15.0))
    assert (refused.status, refused.reason) == (503, "no_workers")
    assert rejection(state.place(request("b"), 16.0)).reason == "no_workers"


def test_no_more_wait_for_workers_than_may_be_queued() -> None:
    state = cluster(prefill=0, max_queued_requests=2)
    assert state.place(request("a"), 0.0) == state.place(request("b"), 0.0) == []
    assert rejection(state.place(request("c"), 0.0)).reason == "no_workers"


def test_place_is_idempotent() -> None:
    state = cluster(prefill=2, decode=2)
    first = placement(state.place(request("a"), 0.0))
    assert placement(state.place(request("a"), 1.0)) == first
    assert state.statistics.placements == 1
    state.validate()


def test_a_burst_spreads_and_ties_are_broken_fairly() -> None:
    """Case 23: load counts when placed, not when reported."""
    state = cluster(prefill=4, decode=4)
    chosen = [placement(state.place(request(str(i)), 0.0)) for i in range(8)]
    for role in ("prefill", "decode"):
        names = [str(getattr(each, role).name) for each in chosen]
        assert sorted(names) == sorted([f"{role}-{i}" for i in range(4)] * 2)
    state.validate()


def test_the_less_loaded_worker_is_chosen() -> None:
    state = cluster(decode=2, placement="least_loaded")
    big = placement(state.place(request("big", prompt_len=500), 0.0))
    small = [placement(state.place(request(str(i)), 0.0)) for i in range(3)]
    assert all(each.decode != big.decode for each in small)


def test_first_come_first_served_up_to_the_running_limit() -> None:
    state = cluster(max_running_requests=1)
    placement(state.place(request("a"), 0.0))
    assert state.place(request("b"), 0.0) == []
    assert state.place(request("c"), 0.0) == []
    assert placement(state.ended(ended("a"), 1.0)).attempt == AttemptId("b", 0)
    assert placement(state.ended(ended("b"), 2.0)).attempt == AttemptId("c", 0)
    state.validate()


def test_a_resumed_attempt_goes_first_and_is_not_counted_against_the_queue() -> None:
    """Case 15."""
    state = cluster(max_running_requests=1, max_queued_requests=1)
    placement(state.place(request("a"), 0.0))
    state.place(request("b"), 0.0)
    assert state.place(request("r", 1, resumed=True), 0.0) == []
    assert rejection(state.place(request("c"), 0.0)).status == 429
    assert placement(state.ended(ended("a"), 1.0)).attempt == AttemptId("r", 1)


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    state = cluster(max_running_requests=1, max_queued_requests=0)
    placement(state.place(request("a"), 0.0))
    refused = rejection(state.place(request("b"), 0.0))
    assert refused.status == 429
    assert refused.retry_after_s
    assert not state.waiting


def test_the_queue_has_a_deadline() -> None:
    state = cluster(max_running_requests=1)
    placement(state.place(request("a"), 0.0))
    state.place(request("b", timeout_s=5.0), 0.0)
    assert state.tick(4.9) == []
    assert rejection(state.tick(5.0)).status == 504


def test_a_withdrawn_request_is_not_placed() -> None:
    """Case 2."""
    state = cluster(max_running_requests=1)
    placement(state.place(request("a"), 0.0))
    state.place(request("b"), 0.0)
    state.ended(ended("b", "aborted"), 0.5)
    assert state.ended(ended("a"), 1.0) == []
    state.validate()


def test_an_end_that_overtakes_its_question_withdraws_it() -> None:
    """They come by different queues of the actor: nobody waits for the answer any more."""
    state = cluster()
    assert state.ended(ended("a", "aborted"), 0.0) == []
    assert rejection(state.place(request("a"), 0.1)).reason == "withdrawn"
    placement(state.place(request("a", 1), 0.2))
    state.validate()


def test_an_unclaimed_placement_expires() -> None:
    state = cluster()
    placement(state.place(request("a"), 0.0))
    for second in range(9):
        state.report(report("decode-0"), float(second))
        state.report(report("prefill-0"), float(second))
    state.tick(9.9)
    assert state.leases
    state.tick(10.0)
    assert not state.leases
    assert state.statistics.leases_expired == 1
    state.validate()


def test_a_claimed_placement_ends_when_its_worker_forgets_it() -> None:
    state = cluster()
    placement(state.place(request("a"), 0.0))
    attempt = (AttemptId("a", 0),)
    state.report(report("decode-0", attempts=attempt), 1.0)
    state.tick(100.0)
    state = cluster()
    placement(state.place(request("a"), 0.0))
    state.report(report("decode-0", attempts=attempt), 1.0)
    assert state.leases
    state.report(report("decode-0"), 2.0)
    assert not state.leases
    state.validate()


def test_a_refusal_keeps_the_worker_out_until_its_next_report() -> None:
    state = cluster(decode=1)
    placement(state.place(request("a"), 0.0))
    state.ended(ended("a", "refused"), 0.1)
    assert state.place(request("a", 1), 0.1) == []
    _, answers = state.report(report("decode-0"), 1.0)
    assert placement(answers).attempt == AttemptId("a", 1)


def test_an_avoided_worker_is_taken_only_if_there_is_no_other() -> None:
    state = cluster(decode=2)
    avoid = (WorkerId("decode-0", "a"),)
    for i in range(3):
        chosen = placement(state.place(request(str(i), avoid=avoid), 0.0))
        assert chosen.decode.name == "decode-1"
    state.worker_lost(WorkerId("decode-1", "a"), 1.0)
    chosen = placement(state.place(request("x", avoid=avoid), 1.0))
    assert chosen.decode.name == "decode-0"


def test_a_new_incarnation_takes_the_place_of_the_old() -> None:
    """Case 22: a restarted worker gets traffic, with nothing of its former life."""
    state = cluster()
    placement(state.place(request("a"), 0.0))
    state.report(report("decode-0", "b"), 1.0)
    assert not state.leases
    chosen = placement(state.place(request("b"), 1.0))
    assert chosen.decode == WorkerId("decode-0", "b")
    state.worker_lost(WorkerId("decode-0", "a"), 2.0)  # late news of the old one
    assert "decode-0" in state.workers
    state.validate()


def test_a_silent_worker_is_lost() -> None:
    state = cluster()
    state.report(report("prefill-0"), 15.0)
    state.tick(20.0)
    assert list(state.workers) == ["prefill-0"]


def test_workers_that_differ_are_refused_by_name() -> None:
    """Case 12."""
    state = cluster()
    other = {"model": "m", "page_size": "16"}
    reply, _ = state.report(report("decode-1", signature=other), 0.0)
    assert reply.error is not None
    assert "page_size is '16' here and '1' there" in reply.error
    assert "decode-1" not in state.workers


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed: int) -> None:
    """Whatever happens, loads are the sums of the leases, and every request gets one answer."""
    rng = random.Random(seed)
    state = cluster(prefill=2, decode=3, max_running_requests=3, max_queued_requests=5)
    answered: dict[AttemptId, int] = {}
    running: list[str] = []
    now = 0.0

    def take(answers: list[Answer]) -> None:
        for answer in answers:
            answered[answer.attempt] = answered.get(answer.attempt, 0) + 1
            if isinstance(answer.reply, Placement):
                running.append(answer.attempt.request)

    for index in range(300):
        now += rng.random()
        match rng.randrange(6):
            case 0 | 1 | 2:
                length = rng.randrange(1, 50)
                take(state.place(request(str(index), prompt_len=length, timeout_s=9.0), now))
            case 3 if running:
                name = running.pop(rng.randrange(len(running)))
                take(state.ended(ended(name, rng.choice(["finished", "refused"])), now))
            case 4:
                name = rng.choice(["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"])
                alive = tuple(AttemptId(each, 0) for each in running)
                take(state.report(report(name, attempts=alive), now)[1])
            case _:
                take(state.tick(now))
        state.validate()
    assert max(answered.values()) == 1
    assert not set(answered) & set(state.waiting)
