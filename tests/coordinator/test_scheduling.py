"""The coordinator with placement by cost: late binding, admission, tenants, priorities, reasons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pd_cluster.cache.events import PagesStored
from pd_cluster.config import Config
from pd_cluster.coordinator.choice import Weights
from pd_cluster.coordinator.costs import Priors, TierMeasured
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.prefix_hash import block_hashes, pack_hashes
from pd_cluster.coordinator.queue import OLDEST_EVERY, PATIENCE_S
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.coordinator.state import Answer, CoordinatorState
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    IntArray,
    Outcome,
    Placement,
    PlaceRequest,
    Rejection,
    Role,
    Route,
    WorkerId,
    WorkerReport,
)

# A millisecond a prompt token.
PRIORS = Priors(prefill=(0.0, 1e-3, 0.0), decode=(0.01, 0.0, 0.0))
COST = Scheduling(placement="cost", priors=PRIORS, weights=Weights(bind_ahead_s=0.1))
# Binds at once, however much its worker has to do.
EAGER = replace(COST, weights=Weights(bind_ahead_s=1e9))
ALL_ROUTES: tuple[Route, ...] = ("remote", "remote+pull", "local")


def report(
    name: str, incarnation: str = "a", routes: tuple[Route, ...] = ("remote",), **changes: object
) -> WorkerReport:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    whole = WorkerReport(
        worker=WorkerId(name, incarnation),
        role=role,
        signature={},
        capacity=10_000,
        available=10_000,
        running=0,
        waiting=0,
        routes=routes,
    )
    fields = {key: getattr(whole, key) for key in WorkerReport.__struct_fields__} | changes
    return WorkerReport(**fields)


def request(
    name: str, tokens: IntArray | int = 100, number: int = 0, **changes: object
) -> PlaceRequest:
    blocks = b"" if isinstance(tokens, int) else pack_hashes(block_hashes(tokens, 64))
    fields: dict[str, object] = {
        "attempt": AttemptId(name, number),
        "gateway": "gateway-0",
        "prompt_len": tokens if isinstance(tokens, int) else len(tokens),
        "max_tokens": 10,
        "timeout_s": 100.0,
        "blocks": blocks,
        **changes,
    }
    return PlaceRequest(**fields)  # type: ignore[arg-type]


def cluster(
    prefill: int = 2, decode: int = 2, scheduling: Scheduling = COST, **config: object
) -> CoordinatorState:
    state = CoordinatorState(Config.model_validate(config), scheduling)
    for index in range(prefill):
        state.report(report(f"prefill-{index}"), 0.0)
    for index in range(decode):
        state.report(report(f"decode-{index}"), 0.0)
    return state


def hold(state: CoordinatorState, name: str, tokens: IntArray) -> None:
    pages = np.arange(len(tokens), dtype=np.int32)
    event = PagesStored(None, None, tokens, pages)
    assert state.kv_events(KvUpdate(WorkerId(name, "a"), 0, (event,)), 0.0)


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


def prompt(seed: int, length: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, 1000, length, dtype=np.int32)


# --- placement in the state ---


def test_events_lead_to_placement_and_reasons_say_so() -> None:
    state = cluster()
    tokens = prompt(0, 640)
    hold(state, "prefill-1", tokens)
    hold(state, "decode-1", tokens[:320])
    chosen = placement(state.place(request("a", tokens), 0.0))
    assert (chosen.prefill.name, chosen.decode.name) == ("prefill-1", "decode-1")
    why = state.explain(AttemptId("a", 0))
    assert why is not None
    assert (why["prefill"], why["prefill_held"], why["decode_held"]) == ("prefill-1@a", 639, 320)
    best = why["candidates"]["prefill"][0]
    assert best["worker"] == "prefill-1@a"
    assert best["cost"] == pytest.approx(best["queue"] + best["compute"] + best["balance"])
    assert state.explain(AttemptId("b", 0)) is None
    # It can be explained after its workers are gone.
    state.worker_lost(chosen.prefill, 1.0)
    assert state.explain(AttemptId("a", 0)) == why
    state.validate()


def test_what_lies_below_is_placed_by_and_said() -> None:
    state = cluster()
    tokens = prompt(0, 640)
    for name in ("prefill-1", "decode-1"):
        stored = PagesStored(None, None, tokens, np.arange(len(tokens)), "host")
        assert state.kv_events(KvUpdate(WorkerId(name, "a"), 0, (stored,)), 0.0)
    chosen = placement(state.place(request("a", tokens), 0.0))
    assert (chosen.prefill.name, chosen.decode.name) == ("prefill-1", "decode-1")
    assert chosen.promote
    why = state.explain(AttemptId("a", 0))
    assert why is not None
    assert (why["prefill_held"], why["prefill_below"], why["decode_below"]) == (0, 639, 640)
    best = why["candidates"]["prefill"][0]
    assert (best["worker"], best["held"], best["below"]) == ("prefill-1@a", 0, 639)
    assert best["promote"] > 0
    # Until the tiers turn out to be slow: decode is told not to load.
    slow = [TierMeasured("host", 640, 3.0)] * 50
    state.measured(WorkerId("decode-1", "a"), slow)
    state.cluster.decode.ready[0] = False
    state.ended(ended("a"), 5.0)
    chosen = placement(state.place(request("b", tokens), 10.0))
    assert (chosen.decode.name, chosen.promote) == ("decode-1", False)
    state.validate()


def test_a_restarted_worker_is_expected_to_hold_nothing() -> None:
    """Case 22."""
    state = cluster()
    tokens = prompt(0, 640)
    hold(state, "prefill-1", tokens)
    state.report(report("prefill-1", "b"), 1.0)
    assert len(state.cluster.prefill.index.holders) == 0
    update = KvUpdate(WorkerId("prefill-1", "a"), 1, ())
    assert state.kv_events(update, 1.0), "late news of the old one need no snapshot"
    used = {placement(state.place(request(str(i)), 1.0)).prefill for i in range(2)}
    assert used == {WorkerId("prefill-0", "a"), WorkerId("prefill-1", "b")}
    state.validate()


def test_a_burst_computes_each_shared_prefix_once() -> None:
    """64 requests of 8 groups in one instant, interleaved: each group goes where it was begun."""
    state = cluster(prefill=4, decode=4, scheduling=EAGER)
    groups = [prompt(seed, 640) for seed in range(8)]
    where: dict[int, set[str]] = {group: set() for group in range(8)}
    computed = 0.0
    for number in range(64):
        group = number % 8
        tail = np.full(1, 2000 + number, np.int32)
        name = str(number)
        tokens = np.concatenate([groups[group], tail])
        where[group].add(placement(state.place(request(name, tokens), 0.0)).prefill.name)
        computed += state.leases[AttemptId(name, 0)].choice.prefill_s
    assert all(len(names) == 1 for names in where.values())
    assert computed == pytest.approx((8 * 640 + 64) * 1e-3)
    loads = state.cluster.prefill.tokens
    assert loads.max() == loads.min()
    state.validate()


def test_what_was_expected_is_not_for_ever() -> None:
    state = cluster(prefill=1, decode=1)
    tokens = prompt(0, 640)
    placement(state.place(request("a", tokens), 0.0))
    table = state.cluster.prefill.index.expected.table
    assert len(table) == 10
    state.report(report("decode-0", attempts=(AttemptId("a", 0),)), 5.0)
    state.tick(5.6)
    assert len(table) == 10
    state.tick(5.7)  # computed at 0.64, and five seconds of grace
    assert len(table) == 0
    state.ended(ended("a"), 6.0)
    state.validate()


# --- late binding ---


def test_requests_wait_in_the_queue_until_a_worker_is_about_to_be_free() -> None:
    state = cluster(prefill=1)
    placement(state.place(request("a", 1000), 0.0))
    assert state.place(request("b", 100), 0.0) == []
    assert state.place(request("c", 100), 0.0) == []
    assert state.wake_at == pytest.approx(0.9)
    assert state.tick(0.5) == []
    assert placement(state.tick(0.91)).attempt.request == "b"
    assert placement(state.tick(1.01)).attempt.request == "c"
    state.validate()


def test_binding_is_late_so_a_better_worker_can_still_come() -> None:
    state = cluster(prefill=1)
    placement(state.place(request("a", 5000), 0.0))
    assert state.place(request("b", 100), 0.0) == []
    state.report(report("prefill-1"), 1.0)
    assert state.tick(4.8) == []
    assert placement(state.tick(4.91)).prefill.name == "prefill-1"


def test_a_lost_worker_sends_those_that_waited_for_it_elsewhere() -> None:
    state = cluster(prefill=2)
    tokens = prompt(0, 6400)
    hold(state, "prefill-0", tokens)
    state.place(request("big", np.concatenate([tokens, prompt(1, 900)]), max_tokens=1), 0.0)
    assert state.place(request("b", tokens), 0.0) == []
    answers = state.worker_lost(WorkerId("prefill-0", "a"), 0.1)
    assert placement(answers).prefill.name == "prefill-1"
    state.validate()


def test_the_prefill_workers_own_word_overrules_the_estimate() -> None:
    state = cluster(prefill=1)
    placement(state.place(request("a", 9000), 0.0))
    assert state.place(request("b"), 0.0) == []
    state.report(report("decode-0", attempts=(AttemptId("a", 0),)), 1.0)
    state.report(report("decode-1", attempts=(AttemptId("a", 0),)), 1.0)
    _, answers = state.report(report("prefill-0"), 1.0)  # idle: it was faster than we thought
    assert placement(answers).attempt.request == "b"
    state.validate()


def test_a_deadline_that_cannot_be_met_ends_the_wait_at_once() -> None:
    state = cluster(prefill=1)
    placement(state.place(request("a", 9000), 0.0))
    refused = rejection(state.place(request("b", 100, timeout_s=5.0), 0.0))
    assert (refused.status, refused.reason) == (504, "deadline")
    assert not state.waiting
    state.validate()


# --- admission ---


def test_what_can_never_fit_is_a_400_and_what_just_fits_is_served() -> None:
    """Case 14."""
    state = cluster()
    refused = rejection(state.place(request("a", 9_991, max_tokens=10), 0.0))
    assert (refused.status, refused.reason) == (400, "never_fits")
    assert "10001 tokens" in refused.message
    assert "10000" in refused.message
    assert placement(state.place(request("b", 9_990, max_tokens=10), 0.0))


def test_growth_is_counted_until_there_is_no_room() -> None:
    """Each asks for 1,000 tokens and may grow by 1,000, of which 0.7 count at first."""
    state = cluster(prefill=8, decode=1)
    placed = sum(bool(state.place(request(str(i), 1000, max_tokens=1000), 0.0)) for i in range(8))
    assert placed == 5  # 5 x 1,700 = 8,500
    # Later less growth is counted, though what a report includes is not counted twice.
    attempts = tuple(AttemptId(str(i), 0) for i in range(5))
    _, answers = state.report(report("decode-0", attempts=attempts, available=5_000), 40.0)
    assert len(answers) == 3  # 1,000 each, and 98 for each that runs
    state.validate()


def test_conservativeness_scales_the_growth() -> None:
    counts = []
    for value in (0.1, 0.5, 2.0):
        state = cluster(
            prefill=8, decode=1, scheduling=replace(EAGER, schedule_conservativeness=value)
        )
        counts.append(
            sum(bool(state.place(request(str(i), 1000, max_tokens=1000), 0.0)) for i in range(10))
        )
    assert counts == [9, 7, 5]


def test_a_pool_that_is_too_small_for_all_serves_them_one_after_another() -> None:
    """Case 13, seen from here: each fits alone, both never at once."""
    state = cluster(decode=0)
    state.report(report("decode-0", capacity=7, available=7), 0.0)
    placement(state.place(request("a", 4, max_tokens=2), 0.0))
    assert state.place(request("b", 3, max_tokens=2), 0.0) == []
    assert placement(state.ended(ended("a"), 1.0)).attempt.request == "b"


def test_a_retraction_makes_admission_careful() -> None:
    state = cluster()
    placement(state.place(request("a"), 15.0))
    low = state.ratio.at(15.0)
    state.ended(ended("a", "retracted"), 15.0)
    assert state.ratio.at(15.0) > low


# --- tenants and priorities ---


def test_the_configuration_reaches_the_coordinator() -> None:
    config = Config.model_validate(
        {
            "placement": "cost",
            "itl_limit_s": 0.2,
            "local_prefill_size": 32,
            "schedule_policy": "lof",
            "schedule_conservativeness": 0.5,
            "enable_priority_scheduling": True,
            "max_queued_per_tenant": 3,
            "max_running_per_tenant": 2,
            "retraction_policy": "priority",
        }
    )
    state = CoordinatorState(config)
    settings = state.scheduling
    assert (settings.placement, settings.schedule_policy) == ("cost", "lof")
    assert (settings.limits.itl_limit_s, settings.limits.chunk_tokens) == (0.2, 32)
    assert (settings.max_queued_per_tenant, settings.max_running_per_tenant) == (3, 2)
    assert settings.enable_priority_scheduling
    assert state.ratio.initial == pytest.approx(0.35)
    reply, _ = state.report(report("decode-0"), 0.0)
    assert reply.retraction_policy == "priority"


def test_a_tenants_limits_are_its_own() -> None:
    limits = replace(COST, max_running_per_tenant=1, max_queued_per_tenant=1)
    state = cluster(scheduling=limits)
    placement(state.place(request("a", tenant="x"), 0.0))
    assert state.place(request("b", tenant="x"), 0.0) == []
    refused = rejection(state.place(request("c", tenant="x"), 0.0))
    assert (refused.status, refused.reason) == (429, "tenant_queue_full")
    assert refused.retry_after_s
    assert placement(state.place(request("d", tenant="y"), 0.0))
    assert placement(state.ended(ended("a"), 1.0)).attempt.request == "b"
    state.validate()


def test_a_full_queue_makes_room_for_a_higher_priority() -> None:
    settings = replace(COST, enable_priority_scheduling=True, schedule_policy="priority")
    state = cluster(scheduling=settings, max_running_requests=1, max_queued_requests=1, decode=1)
    placement(state.place(request("a"), 0.0))
    assert state.place(request("low"), 0.0) == []
    answers = state.place(request("high", priority=5), 0.0)
    assert rejection(answers).attempt.request == "low"
    assert rejection(state.place(request("low2"), 0.0)).attempt.request == "low2"
    assert placement(state.ended(ended("a"), 1.0)).attempt.request == "high"
    state.validate()


def test_longest_prefix_match_looks_at_the_index() -> None:
    settings = replace(COST, schedule_policy="lpm")
    state = cluster(scheduling=settings, decode=1, max_running_requests=1)
    tokens = prompt(0, 640)
    hold(state, "prefill-0", tokens)
    placement(state.place(request("a"), 0.0))
    state.place(request("cold", prompt(1, 640)), 0.0)
    state.place(request("warm", tokens), 0.0)
    assert placement(state.ended(ended("a"), 5.0)).attempt.request == "warm"


# --- routes ---


def test_a_route_is_taken_only_if_every_worker_can() -> None:
    """Case 21: the local route is counted as such."""
    tokens = prompt(0, 640)
    state = cluster(prefill=0, decode=0)
    for name in ("prefill-0", "decode-0"):
        state.report(report(name, routes=ALL_ROUTES), 0.0)
    hold(state, "decode-0", tokens)
    assert placement(state.place(request("a", tokens), 0.0)).route == "local"
    assert state.statistics.routes == {"local": 1}
    assert state.cluster.prefill.attempts.sum() == 0
    state.validate()
    state.report(report("decode-1"), 0.0)
    assert placement(state.place(request("b", tokens), 0.0)).route == "remote"
    state.worker_lost(WorkerId("decode-1", "a"), 0.0)
    assert placement(state.place(request("c", tokens), 0.0)).route == "local"
    state.ended(ended("a"), 1.0)
    state.validate()


# --- preemption ---

PREEMPTING = replace(EAGER, enable_priority_scheduling=True)


def full(low: int = 5, **changes: object) -> CoordinatorState:
    """A decode worker that has no room beside `low` requests of priority 0."""
    state = cluster(prefill=8, decode=1, scheduling=PREEMPTING)
    for index in range(low):
        placement(state.place(request(f"low{index}", 1000, max_tokens=1000, **changes), 0.0))
    attempts = tuple(AttemptId(f"low{index}", 0) for index in range(low))
    state.report(report("decode-0", attempts=attempts, available=10_000 - 1000 * low), 0.0)
    return state


def test_a_higher_priority_that_finds_no_room_has_lower_ones_make_it() -> None:
    state = full()
    assert state.place(request("high", 3000, priority=1, max_tokens=100), 0.0) == []
    ((worker, order),) = state.take_orders()
    assert worker == WorkerId("decode-0", "a")
    # Its prompt, and of all growth the part that counts at first.
    assert order.tokens == 3000 + 70 + 5 * 700
    assert order.candidates == tuple((AttemptId(f"low{i}", 0), 700) for i in range(5))
    assert state.take_orders() == []
    # The worker retracts two and says so at once: there is room, before the gateways tell.
    left = tuple(AttemptId(f"low{index}", 0) for index in range(3))
    _, answers = state.report(report("decode-0", attempts=left, available=7_000), 0.1)
    assert placement(answers).attempt.request == "high"
    low = state.ratio.at(0.2)
    for index in (3, 4):
        state.ended(ended(f"low{index}", "retracted"), 0.2)
        state.ended(ended(f"low{index}", "retracted"), 0.2)  # twice told is told once
    assert state.statistics.outcomes == {"retracted": 2}
    assert state.ratio.at(0.2) == low, "no worker was out of pages"
    state.validate()


def test_nobody_is_asked_to_make_room_for_its_equal() -> None:
    for priority, settings in ((0, {}), (1, {"priority": 1}), (1, {"retractions": 3})):
        state = full(**settings)
        assert state.place(request("new", 3000, priority=priority), 0.0) == []
        assert state.take_orders() == []


def test_who_has_waited_long_may_take_the_place_of_an_equal_before_a_higher_priority() -> None:
    state = full()
    state.worker_timeout_s = float("inf")
    for number in range(OLDEST_EVERY):
        state.queue.placed(state.queue.add(request(f"x{number}"), [], 0.0))
        state.queue.remove(AttemptId(f"x{number}", 0))
    state.place(request("low", 5000, timeout_s=1000.0), 0.0)
    state.place(request("high", 3000, priority=1, timeout_s=1000.0), 0.0)
    assert len(state.take_orders()) == 1, "for the higher one"
    state.tick(PATIENCE_S)
    ((_, order),) = state.take_orders()
    assert len(order.candidates) == 5
    assert order.tokens > 5000, "for the one that has waited"
    state.queue.remove(AttemptId("high", 0))
    state.tick(PATIENCE_S + 2)
    assert state.take_orders() == [], "nobody comes after it that counts more"


def test_without_priority_scheduling_nobody_is_asked() -> None:
    state = cluster(prefill=8, decode=1, scheduling=EAGER, max_running_requests=1)
    placement(state.place(request("low"), 0.0))
    assert state.place(request("high", priority=1), 0.0) == []
    assert state.take_orders() == []


def test_a_place_is_asked_for_again_only_after_a_while() -> None:
    state = full()
    state.place(request("high", 3000, priority=1), 0.0)
    assert len(state.take_orders()) == 1
    state.tick(0.9)
    assert state.take_orders() == []
    state.tick(1.0)
    assert len(state.take_orders()) == 1


def test_a_worker_that_runs_as_many_as_it_may_makes_room_too() -> None:
    state = cluster(decode=1, scheduling=PREEMPTING, max_running_requests=2)
    for name in ("a", "b"):
        placement(state.place(request(name), 0.0))
    assert state.place(request("high", priority=7), 0.0) == []
    ((_, order),) = state.take_orders()
    assert [attempt.request for attempt, _ in order.candidates] == ["a", "b"]
    # The one that was retracted comes back behind the higher priority, before its equals.
    assert placement(state.ended(ended("a", "retracted"), 0.1)).attempt.request == "high"
    state.place(request("c"), 0.1)
    state.place(request("a", number=1, resumed=True, retractions=1), 0.1)
    assert placement(state.ended(ended("high"), 1.0)).attempt == AttemptId("a", 1)
    assert placement(state.ended(ended("b"), 1.0)).attempt.request == "c"
    state.validate()
