"""Workers that are to leave: they get nothing new, keep what they have, and may be taken back."""

from __future__ import annotations

from pd_cluster.coordinator.wishes import Wishes
from pd_cluster.scaling import Counts, News, Order, Refusal, ScalingStatus, Wish
from pd_cluster.types import AttemptId, WorkerId
from tests.coordinator.test_state import cluster, ended, placement, report, request

LEAVING = ("prefill-1", "decode-1")


def test_nothing_new_and_what_is_there_goes_on() -> None:
    state = cluster(prefill=2, decode=2)
    first = [placement(state.place(request(str(i)), 0.0)) for i in range(4)]
    assert {each.decode.name for each in first} == {"decode-0", "decode-1"}
    assert state.set_draining(LEAVING, 1.0) == []
    assert {state.standing(each) for each in state.workers.values()} == {"ready", "draining"}
    later = [placement(state.place(request(f"later{i}"), 1.0)) for i in range(6)]
    assert {(each.prefill.name, each.decode.name) for each in later} == {("prefill-0", "decode-0")}
    state.validate()
    # Its attempts keep their leases until they end: by then nothing is placed there.
    assert len(state.workers["decode-1"].placed) == 2
    for index in range(4):
        state.ended(ended(str(index)), 2.0)
    assert not state.workers["decode-1"].placed
    assert not state.workers["prefill-1"].placed
    state.validate()


def test_saying_it_again_changes_nothing_and_taking_it_back_does() -> None:
    state = cluster(decode=2, max_running_requests=1)
    state.set_draining(["decode-1"], 0.0)
    placement(state.place(request("a"), 0.0))
    assert state.place(request("b"), 0.0) == []
    assert state.set_draining(["decode-1"], 1.0) == []
    taken = placement(state.set_draining([], 2.0))
    assert (taken.attempt, taken.decode.name) == (AttemptId("b", 0), "decode-1")
    state.validate()


def test_a_restart_does_not_bring_it_back() -> None:
    state = cluster(decode=2)
    state.set_draining(["decode-1"], 0.0)
    state.report(report("decode-1", "b"), 1.0)
    assert all(
        placement(state.place(request(str(i)), 1.0)).decode.name == "decode-0" for i in range(4)
    )
    # Nor does one that registers only now get work.
    state.set_draining(["decode-1", "decode-2"], 2.0)
    state.report(report("decode-2"), 2.0)
    assert placement(state.place(request("x"), 2.0)).decode.name == "decode-0"
    state.validate()


def test_who_leaves_on_purpose_is_not_lost() -> None:
    state = cluster(decode=3)
    state.set_draining(["decode-1"], 0.0)
    state.worker_lost(WorkerId("decode-1", "a"), 1.0)
    state.worker_lost(WorkerId("decode-2", "a"), 1.0)
    state.set_draining([], 2.0)
    assert state.lost.keys() == {"decode-2"}
    assert state.workers.keys() == {"prefill-0", "decode-0"}


def test_who_waits_for_a_leaving_prefill_worker_looks_for_another() -> None:
    state = cluster(prefill=2, placement="cost")
    state.cluster.prefill.busy_until[:] = (30.0, 20.0)
    assert state.place(request("a", prompt_len=500), 0.0) == []
    (entry,) = state.queue.entries.values()
    assert entry.pledge is not None
    assert entry.pledge[0] == 1
    state.set_draining(["prefill-1"], 1.0)
    state.validate()
    assert entry.pledge is not None
    assert entry.pledge[0] == 0


STATUS = ScalingStatus(
    counts=Counts(prefill=1, decode=1, gateway=1), members={}, wishes=0, steady=True
)


def test_wishes_are_handed_over_once_and_answered() -> None:
    wishes, answers = Wishes(), []
    wishes.add(Wish(prefill=2), answers.append)
    wishes.add(Wish(drain="decode-0"), answers.append)
    news = wishes.order(Order(status=STATUS), {"decode-0": 3})
    assert news == News(
        placed={"decode-0": 3}, wishes={1: Wish(prefill=2), 2: Wish(drain="decode-0")}
    )
    assert wishes.order(Order(status=STATUS), {}).wishes == {}
    assert not answers
    refusal = Refusal(status=400, message="the last")
    wishes.order(Order(status=STATUS, answers={2: refusal, 1: None}), {})
    assert answers == [refusal, STATUS]
    wishes.order(Order(status=STATUS, answers={1: None}), {})  # said twice
    assert len(answers) == 2
    assert wishes.status == STATUS


def test_an_answer_from_before_a_restart_answers_no_new_wish() -> None:
    wishes, answers = Wishes(), []
    wishes.add(Wish(prefill=2), answers.append)
    news = wishes.order(Order(status=STATUS, answers={1: None}), {})
    assert not answers
    assert news.wishes == {1: Wish(prefill=2)}
