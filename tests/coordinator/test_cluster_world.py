"""Coordinator and schedulers together, under whatever happens in whatever order."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pd_cluster.types import MAX_RETRACTIONS, RetractionPolicy
from tests.coordinator.cluster_world import ClusterWorld

QUEUE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")
PLACEMENTS = ("cost", "least_loaded", "random", "round_robin", "prefix_prefill_only")
# What became of attempts, over all examples of one run.
SEEN: Counter[str] = Counter()


class ClusterMachine(RuleBasedStateMachine):
    """Invariants 1, 3, 6 and 7: pages are conserved, none in flight is freed (the memory would hold
    another prefix), every token has one source, and every request ends.
    """

    cluster: ClusterWorld

    @initialize(
        seed=st.integers(0, 2**32),
        placement=st.sampled_from(PLACEMENTS),
        schedule_policy=st.sampled_from(QUEUE_POLICIES),
        page_size=st.sampled_from([1, 4]),
        by_priority=st.booleans(),
        retraction_policy=st.sampled_from(["length", "priority"]),
        tiers=st.booleans(),
    )
    def start(
        self,
        seed: int,
        placement: str,
        schedule_policy: str,
        page_size: int,
        by_priority: bool,
        retraction_policy: RetractionPolicy,
        tiers: bool,
    ) -> None:
        self.cluster = ClusterWorld(
            seed,
            placement=placement,
            schedule_policy=schedule_policy,
            page_size=page_size,
            by_priority=by_priority,
            retraction_policy=retraction_policy,
            tiers=tiers,
        )

    @rule(count=st.integers(1, 8))
    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.cluster.arrive()

    @rule(count=st.integers(1, 60))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.cluster.step()

    @rule()
    def report(self) -> None:
        self.cluster.report()

    @rule()
    def tick(self) -> None:
        self.cluster.tick()

    @rule()
    def abort(self) -> None:
        self.cluster.abort()

    @rule()
    def leave_at_once(self) -> None:
        self.cluster.leave_at_once()

    @rule()
    def kill(self) -> None:
        self.cluster.kill()

    @rule()
    def restart(self) -> None:
        self.cluster.restart()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.validate()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.settle()
            SEEN.update(self.cluster.outcomes)
            SEEN["preempted"] += self.cluster.preemptions
            SEEN["restarts"] += self.cluster.restarts
            SEEN["read from tiers"] += self.cluster.reads
            SEEN["cancelled early"] += len(self.cluster.world.cancelled_early)


def run_machine(examples: int, steps: int, chance: int = 0) -> None:
    SEEN.clear()
    run_state_machine_as_test(
        hypothesis.seed(chance)(ClusterMachine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # It has met what it is about.
    for what in (
        "refused",
        "retracted",
        "failed",
        "preempted",
        "restarts",
        "cancelled early",
        "read from tiers",
    ):
        assert SEEN[what], (what, SEEN)


def test_whatever_happens_every_request_ends_with_its_own_tokens() -> None:
    run_machine(examples=24, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chance", range(1, 18))
def test_whatever_happens_for_a_hundred_thousand_steps(chance: int) -> None:
    run_machine(examples=100, steps=60, chance=chance)


@pytest.mark.parametrize("retraction_policy", ["length", "priority"])
def test_a_pool_of_a_third_of_the_demand_serves_all(retraction_policy: RetractionPolicy) -> None:
    """Case 15: with retractions, refusals and every route, and nothing lost."""
    routes, retracted = set(), 0
    for seed in range(8):
        cluster = ClusterWorld(
            seed,
            placement="cost",
            schedule_policy="fcfs",
            page_size=1,
            retraction_policy=retraction_policy,
        )
        cluster.disturb = False
        for _ in range(2):  # the second time much of it is held somewhere
            for _ in range(25):
                cluster.arrive(max_tokens=30)
            cluster.settle()
        retracted += cluster.outcomes["retracted"]
        clients = cluster.clients.values()
        assert Counter(client.end for client in clients) == {"finished": 50}
        statistics = cluster.state.statistics
        assert statistics.placements == sum(client.number + 1 for client in clients)
        assert not cluster.state.leases
        routes |= statistics.routes.keys()
    assert retracted
    assert routes == {"remote", "remote+pull", "local"}


@pytest.mark.parametrize("seed", range(4))
def test_high_priorities_take_the_place_of_low_ones_and_all_end(seed: int) -> None:
    """Long answers of low priority fill the pools; what is urgent comes in between, and nobody is
    retracted without end.
    """
    cluster = ClusterWorld(
        seed,
        placement="cost",
        schedule_policy="fcfs",
        page_size=1,
        by_priority=True,
        retraction_policy="priority",
    )
    cluster.disturb = False
    low = [cluster.arrive(100, max_tokens=60, priority=0) for _ in range(12)]
    for _ in range(150):
        cluster.step()
    urgent = [cluster.arrive(100, max_tokens=4, priority=1) for _ in range(6)]
    steps = 0
    while not all(cluster.clients[name].end for name in urgent):
        cluster.step()
        steps += 1
        if steps % 20 == 0:
            for worker in cluster.world.workers:
                cluster._report(worker)
            cluster.tick()
    assert sum(bool(cluster.clients[name].end) for name in low) < len(low)
    assert cluster.preemptions
    cluster.settle()
    assert {client.end for client in cluster.clients.values()} == {"finished"}
    assert all(cluster.clients[name].retractions == 0 for name in urgent)
    retractions = [cluster.clients[name].retractions for name in low]
    assert 0 < max(retractions) <= MAX_RETRACTIONS + 2


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_of_seven_pages_serves_two_that_do_not_fit_together(seed: int) -> None:
    """Case 13: one needs 4 pages and then 1 more, one needs 3 and then 1 more."""
    cluster = ClusterWorld(
        seed, placement="cost", schedule_policy="fcfs", page_size=1, pages=7, workers=1
    )
    cluster.disturb = False
    for length in (4, 3):
        cluster.arrive(length, max_tokens=2)
    cluster.settle()
    assert [client.end for client in cluster.clients.values()] == ["finished"] * 2


def test_demand_equal_to_the_pool_is_served_and_above_it_refused_at_once() -> None:
    """Case 14."""
    cluster = ClusterWorld(
        1, placement="cost", schedule_policy="fcfs", page_size=1, pages=20, workers=1
    )
    cluster.disturb = False
    fits, too_large = cluster.arrive(15, max_tokens=5), cluster.arrive(16, max_tokens=5)
    assert cluster.clients[too_large].end.startswith("rejected: the request needs 21 tokens")
    cluster.settle()
    assert cluster.clients[fits].end == "finished"
