"""Coordinator and schedulers together, under whatever happens in whatever order."""

from __future__ import annotations

from collections import Counter

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

from tests.coordinator.cluster_world import ClusterWorld

QUEUE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")
PLACEMENTS = ("cost", "least_loaded", "random", "round_robin", "prefix_prefill_only")


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
    )
    def start(self, seed: int, placement: str, schedule_policy: str, page_size: int) -> None:
        self.cluster = ClusterWorld(
            seed, placement=placement, schedule_policy=schedule_policy, page_size=page_size
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


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ClusterMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_happens_every_request_ends_with_its_own_tokens() -> None:
    run_machine(examples=8, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens_for_a_hundred_thousand_steps() -> None:
    run_machine(examples=400, steps=60)


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_a_third_of_the_demand_serves_all(seed: int) -> None:
    """Case 15: with retractions, refusals and every route, and nothing lost."""
    cluster = ClusterWorld(seed, placement="cost", schedule_policy="fcfs", page_size=1)
    cluster.disturb = False
    for _ in range(2):  # the second time much of it is held somewhere
        for _ in range(25):
            cluster.arrive()
        cluster.settle()
    assert Counter(client.end for client in cluster.clients.values()) == {"finished": 50}
    assert sum(client.number for client in cluster.clients.values()) > 0
    assert cluster.state.statistics.placements == sum(
        client.number + 1 for client in cluster.clients.values()
    )
    assert len(cluster.state.statistics.routes) > 1
    assert not cluster.state.leases


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_of_seven_pages_serves_two_that_do_not_fit_together(seed: int) -> None:
    """Case 13: one needs 4 pages and then more, one needs 3 and then more."""
    cluster = ClusterWorld(
        seed, placement="cost", schedule_policy="fcfs", page_size=1, pages=7, workers=1
    )
    cluster.disturb = False
    for length in (4, 3):
        cluster.arrive(length, max_tokens=3)
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
