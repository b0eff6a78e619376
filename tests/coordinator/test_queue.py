"""The orders of the queue, and that under none of them anyone waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pd_cluster.coordinator.admission import MAX_GROWTH, NewTokenRatio, growth
from pd_cluster.coordinator.queue import OLDEST_EVERY, PATIENCE_S, Queue, make_queue_policy
from pd_cluster.types import AttemptId, PlaceRequest

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")


def request(name: str, **changes: object) -> PlaceRequest:
    fields: dict[str, object] = {
        "attempt": AttemptId(name, 0),
        "gateway": "gateway-0",
        "prompt_len": 10,
        "max_tokens": 10,
        "timeout_s": 100.0,
        **changes,
    }
    return PlaceRequest(**fields)  # type: ignore[arg-type]


def make_queue(policy: str, *entries: tuple[PlaceRequest, Sequence[int], int]) -> Queue:
    queue = Queue(make_queue_policy(policy))
    for each, hashes, matched in entries:
        queue.add(each, hashes, 0.0).matched = matched
    return queue


def order(
    queue: Queue, work: dict[str, int] | None = None, now: float = 0.0, **running: int
) -> str:
    entries, _ = queue.order(work or {}, running, now)
    return "".join(entry.request.attempt.request for entry in entries)


def test_each_policy_has_its_order() -> None:
    entries = (
        (request("a", max_tokens=5, routing_key="x"), [1, 2], 0),
        (request("b", max_tokens=50, priority=1, routing_key="y"), [3, 4], 64),
        (request("c", max_tokens=7, priority=-1), [1, 5], 640),
        (request("d", max_tokens=9, routing_key="y"), [1, 2], 64),
    )
    expected = {
        "fcfs": "abcd",
        "lpm": "cbda",
        "dfs-weight": "adcb",
        "lof": "bdca",
        "priority": "badc",
        "routing-key": "bdac",
    }
    for policy, letters in expected.items():
        assert order(make_queue(policy, *entries), y=3, x=1) == letters, policy
    shuffled = {order(make_queue("random", *entries)) for _ in range(3)}
    assert len(shuffled) == 1, "seeded"
    assert sorted(shuffled.pop()) == list("abcd")


def test_an_unknown_policy_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="unknown schedule policy 'best'; allowed: fcfs"):
        make_queue_policy("best")


def test_what_resumes_comes_first() -> None:
    queue = make_queue(
        "priority",
        (request("a", priority=9), [], 0),
        (request("r", resumed=True), [], 0),
    )
    assert order(queue) == "ra"
    assert queue.fresh == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(policy: str) -> None:
    """Newcomers that every policy prefers keep coming; the old one is served all the same."""
    queue = Queue(make_queue_policy(policy))
    old = request("old", max_tokens=1, priority=-5, routing_key="rare")
    queue.add(old, [99], 0.0)
    for number in range(4):
        new = request(f"n{number}", max_tokens=99, priority=5, routing_key="x")
        queue.add(new, [1, number], 0.0).matched = 100
    for placed in range(3 * OLDEST_EVERY):
        entries, _ = queue.order({}, {"x": 10}, 0.0)
        chosen = entries[0]
        queue.remove(chosen.request.attempt)
        queue.placed(chosen)
        if chosen.request == old:
            assert placed < OLDEST_EVERY
            return
        new = request(f"m{placed}", max_tokens=99, priority=5, routing_key="x")
        queue.add(new, [1, placed], 0.0).matched = 100
    raise AssertionError(f"starved under {policy}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resumed", [False, True])
def test_nobody_starves_under_priority_scheduling(policy: str, resumed: bool) -> None:
    """The urgent come first while they come; who has waited long enough gets a turn all the same,
    also one that was retracted for them.
    """
    queue = Queue(make_queue_policy(policy), by_priority=True)
    old = request("old", priority=-5, resumed=resumed)
    queue.add(old, [99], 0.0)
    for placed in range(200):
        queue.add(request(f"n{placed}", priority=5), [1, placed], float(placed))
        entries, nobody_overtakes = queue.order({}, {}, float(placed))
        assert nobody_overtakes
        queue.remove(entries[0].request.attempt)
        queue.placed(entries[0])
        if entries[0].request == old:
            assert PATIENCE_S <= placed <= PATIENCE_S + OLDEST_EVERY
            return
    raise AssertionError(f"starved under {policy}")


def test_within_a_priority_the_policy_orders_and_what_resumes_comes_first() -> None:
    entries = [
        (request("a", max_tokens=5), [], 0),
        (request("b", max_tokens=9), [], 0),
        (request("c", priority=1, max_tokens=5), [], 0),
        (request("d", priority=1, max_tokens=9), [], 0),
        (request("r", resumed=True), [], 0),
        (request("s", priority=1, resumed=True), [], 0),
    ]
    queue = Queue(make_queue_policy("lof"), by_priority=True)
    for each, hashes, _ in entries:
        queue.add(each, hashes, 0.0)
    assert order(queue) == "sdcrba"


def test_the_oldests_turn_says_so_and_ends_with_it() -> None:
    queue = make_queue("lof", (request("a", max_tokens=1), [], 0))
    for number in range(OLDEST_EVERY):
        queue.add(request(f"n{number}", max_tokens=9), [], 0.0)
    for _ in range(OLDEST_EVERY - 1):
        entries, due = queue.order({}, {}, 0.0)
        assert not due
        queue.remove(entries[0].request.attempt)
        queue.placed(entries[0])
    entries, due = queue.order({}, {}, 0.0)
    assert due
    assert entries[0].request.attempt.request == "a"
    queue.remove(entries[0].request.attempt)
    queue.placed(entries[0])
    assert not queue.order({}, {}, 0.0)[1]


def test_tenants_take_turns_by_the_work_they_have() -> None:
    queue = make_queue(
        "fcfs",
        *((request(name, tenant="big"), [], 0) for name in "abcd"),
        *((request(name, tenant="small"), [], 0) for name in "xy"),
    )
    assert order(queue) == "axbycd"
    assert order(queue, {"big": 20}) == "xyabcd"
    queue.remove(AttemptId("x", 0))
    queue.remove(AttemptId("y", 0))
    assert set(queue.by_tenant) == {"big"}


def test_the_new_token_ratio_falls_with_time_and_rises_after_a_retraction() -> None:
    ratio = NewTokenRatio()
    values = [ratio.at(float(second)) for second in range(0, 100, 5)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(0.7)
    assert values[-1] == pytest.approx(0.098)
    ratio.retracted(100.0)
    assert ratio.at(100.0) == pytest.approx(0.7)
    ratio.retracted(100.0)
    assert ratio.at(100.0) == pytest.approx(1.0)
    assert ratio.at(200.0) == pytest.approx(0.098)
    assert NewTokenRatio(10.0).at(0.0) == 1.0
    assert NewTokenRatio(0.5).at(0.0) == pytest.approx(0.35)


def test_an_answer_without_a_limit_of_its_own_is_not_counted_whole() -> None:
    assert growth(100) == 100
    assert growth(1_000_000) == MAX_GROWTH
