"""Which actors are started, drained and ended for the counts that are wanted, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.errors import BadRequest, NotFound
from pd_cluster.scaling import (
    GIVE_UP_S,
    Counts,
    End,
    GiveUp,
    Launch,
    Scaler,
    StopServing,
    Wish,
    parse_counts,
)


def scaler(prefill: int = 1, decode: int = 1, gateway: int = 1, **options: Any) -> Scaler:
    counts = Counts(prefill=prefill, decode=decode, gateway=gateway)
    return Scaler(counts, **{"grace_s": 60.0, "objection": lambda _: None, **options})


def test_counts_that_are_there_need_nothing() -> None:
    state = scaler(2, 3)
    assert state.plan({}, 0.0) == []
    state.wish(Wish(prefill=2, decode=3))
    assert state.plan({}, 0.0) == []
    assert state.status.steady
    assert state.status.wishes == 1


def test_more_are_started_by_the_lowest_free_names() -> None:
    state = scaler()
    state.wish(Wish(prefill=3, decode=2))
    assert state.plan({}, 0.0) == [
        Launch("prefill-1", "prefill"),
        Launch("prefill-2", "prefill"),
        Launch("decode-1", "decode"),
    ]
    assert state.plan({}, 1.0) == []
    assert not state.status.steady
    for name in ("prefill-1", "prefill-2", "decode-1"):
        state.started(name, 2.0)
    assert state.status.steady


def test_fewer_are_drained_and_end_when_nothing_uses_them() -> None:
    state = scaler(3, 1)
    state.wish(Wish(prefill=1))
    assert state.plan({}, 0.0) == []
    assert state.draining == ("prefill-1", "prefill-2")
    assert state.plan({"prefill-1": False, "prefill-2": True}, 1.0) == [End("prefill-2")]
    state.gone("prefill-2")
    assert not state.status.steady
    assert state.plan({"prefill-1": True}, 2.0) == [End("prefill-1")]
    state.gone("prefill-1")
    assert state.status.steady


def test_what_is_not_done_in_time_is_given_up_once_and_ended_later() -> None:
    state = scaler(1, 2)
    state.wish(Wish(decode=1))
    state.plan({}, 0.0)
    assert state.plan({}, 59.9) == []
    assert state.plan({}, 60.0) == [GiveUp("decode-1")]
    assert state.plan({}, 61.0) == []
    assert state.plan({}, 60.0 + GIVE_UP_S) == [End("decode-1")]


def test_a_draining_worker_is_taken_back_rather_than_starting_another() -> None:
    state = scaler(2, 1)
    state.wish(Wish(prefill=1))
    state.plan({}, 0.0)
    state.wish(Wish(prefill=2))
    assert state.plan({"prefill-1": False}, 1.0) == []
    assert state.draining == ()
    assert state.status.steady


def test_one_that_gave_up_its_work_goes_all_the_same() -> None:
    state = scaler(2, 1)
    state.wish(Wish(prefill=1))
    state.plan({}, 0.0)
    assert state.plan({}, 60.0) == [GiveUp("prefill-1")]
    state.wish(Wish(prefill=2))
    assert state.plan({}, 61.0) == [Launch("prefill-2", "prefill")]


def test_what_has_not_started_goes_before_what_serves() -> None:
    state = scaler(1, 1)
    state.wish(Wish(decode=3))
    state.plan({}, 0.0)
    state.started("decode-2", 1.0)
    state.wish(Wish(decode=2))
    state.plan({}, 2.0)
    assert state.draining == ("decode-1",)


def test_a_worker_leaves_by_name_and_is_replaced_before_it_is_missed() -> None:
    state = scaler(2, 1)
    state.wish(Wish(drain="prefill-0"))
    assert state.counts.prefill == 1
    state.plan({}, 0.0)
    assert state.draining == ("prefill-0",)
    state.wish(Wish(drain="prefill-0"))  # again: nothing new
    assert state.counts.prefill == 1
    with pytest.raises(BadRequest, match="prefill-1 is the last prefill worker"):
        state.wish(Wish(drain="prefill-1"))
    with pytest.raises(NotFound, match="there are decode-0, prefill-0, prefill-1"):
        state.wish(Wish(drain="prefill-7"))
    with pytest.raises(NotFound):
        state.wish(Wish(drain="gateway-0"))
    # The name that leaves is not free yet, nor is it taken back.
    state.wish(Wish(prefill=2))
    assert state.plan({}, 1.0) == [Launch("prefill-2", "prefill")]


def test_the_last_that_serves_stays_until_another_is_warm() -> None:
    state = scaler(1, 1)
    state.wish(Wish(prefill=2))
    state.plan({}, 0.0)
    state.wish(Wish(drain="prefill-0"))
    assert state.plan({}, 1.0) == []
    assert state.draining == ()
    state.started("prefill-1", 2.0)
    state.plan({}, 3.0)
    assert state.draining == ("prefill-0",)


def test_one_that_cannot_start_is_not_tried_for_ever() -> None:
    state = scaler(1, 1)
    state.wish(Wish(prefill=3))
    state.plan({}, 0.0)
    state.started("prefill-1", 1.0)
    state.failed("prefill-2", "out of memory")
    assert state.counts.prefill == 2
    assert state.plan({}, 2.0) == []
    assert state.status.steady
    assert state.status.failure == "prefill-2 could not start: out of memory"
    state.wish(Wish(prefill=2))
    assert not state.status.failure


def test_what_cannot_be_had_is_refused_and_changes_nothing() -> None:
    state = scaler(objection=lambda counts: "too many" if counts.prefill > 2 else None)
    with pytest.raises(BadRequest, match="too many"):
        state.wish(Wish(prefill=3, decode=2))
    assert state.counts == Counts(prefill=1, decode=1, gateway=1)
    assert state.plan({}, 0.0) == []


def test_gateways_finish_what_they_have() -> None:
    state = scaler(gateway=2)
    state.wish(Wish(gateway=1))
    assert state.plan({}, 0.0) == [StopServing("gateway-1")]
    assert state.draining == ()
    assert state.plan({"gateway-1": True}, 1.0) == [End("gateway-1")]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "expected an object"),
        ({}, "at least one"),
        ({"prefill": None}, "at least one"),
        ({"workers": 3}, "unknown field 'workers'"),
        ({"prefill": 0}, "prefill must be a whole number from 1 to 64, not 0"),
        ({"decode": -1}, "not -1"),
        ({"decode": 65}, "not 65"),
        ({"decode": True}, "not True"),
        ({"gateways": 1.0}, r"gateways .* not 1\.0"),
        ({"prefill": "2"}, "not '2'"),
    ],
)
def test_bad_numbers_are_named(body: object, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        parse_counts(body)


def test_counts_that_are_left_out_stay() -> None:
    assert parse_counts({"decode": 4, "prefill": None}) == Wish(decode=4)
    assert parse_counts({"gateways": 2}) == Wish(gateway=2)
