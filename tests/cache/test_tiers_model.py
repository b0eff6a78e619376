"""The tiers under random requests, evictions, failures and orders of copying."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import OutOfPages, Pages
from pd_cluster.cache.tier_books import Promotion
from tests.cache.tiered import Tiers

POLICIES = ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"]
kinds_of_page = st.lists(st.integers(0, 2), min_size=2, max_size=8)
namespaces = st.sampled_from([None, None, "a"])


@dataclass(eq=False)
class Request:
    tokens: Tokens
    namespace: str | None
    promotion: Promotion | None
    node: Node | None = None
    table: Pages | None = None


class TierMachine(RuleBasedStateMachine):
    page_size: int

    @initialize(
        eviction=st.sampled_from(POLICIES),
        write=st.sampled_from(["write_through", "write_back", "write_through_selective"]),
        prefetch=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
        device=st.integers(6, 16),
        host=st.integers(4, 32),
        storage=st.booleans(),
    )
    def start_worker(
        self, eviction: str, write: str, prefetch: str, device: int, host: int, storage: bool
    ) -> None:
        self.tiers = Tiers(
            device=device,
            host=host,
            page_size=self.page_size,
            policy=eviction,
            storage={} if storage else None,
            block=2 * self.page_size,
            write_policy=write,
            prefetch_policy=prefetch,
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @rule(kinds=kinds_of_page, tail=st.integers(0, 3), namespace=namespaces)
    def arrive(self, kinds: list[int], tail: int, namespace: str | None) -> None:
        tokens = self.build(kinds, tail)
        self.waiting.append(Request(tokens, namespace, self.tiers.promote(tokens, namespace)))

    @rule(prompts=st.lists(kinds_of_page, min_size=1, max_size=6), namespace=namespaces)
    def serve(self, prompts: list[list[int]], namespace: str | None) -> None:
        """Some requests one after another, all that they wait for done at once."""
        for kinds in prompts:
            try:
                self.tiers.run(self.build(kinds, 0), namespace)
            except OutOfPages:
                self.tiers.drain()

    def build(self, kinds: list[int], tail: int) -> Tokens:
        pages = [[kind // 2] * (self.page_size - 1) + [kind] for kind in kinds]
        values = [token for page in pages for token in page] + [0] * (tail % self.page_size)
        return np.array(values, np.int32)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if request.promotion is not None and not self.tiers.ready(request.promotion):
            return
        try:
            claimed = self.tiers.claim(request.tokens, request.namespace)
        except OutOfPages:
            return
        _, request.node, request.table = claimed
        self.settle(request)
        self.waiting.remove(request)
        self.running.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.settle(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), aborted=st.booleans())
    def end(self, data: st.DataObject, aborted: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.finish(request, 0 if aborted else request.tokens.size)

    @rule(storage_first=st.booleans(), fails=st.integers(0, 9))
    def copy_one(self, storage_first: bool, fails: int) -> None:
        self.tiers.step(storage_first, "broken" if fails == 9 else "")

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.tiers.now += seconds

    @rule()
    def copy_all(self) -> None:
        self.tiers.drain()

    @rule()
    def flush(self) -> None:
        self.tiers.cache.reset()

    @invariant()
    def every_page_holds_what_it_should(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.validate()

    def settle(self, request: Request) -> None:
        if request.promotion is not None:
            self.tiers.cache.settle(request.promotion)
            self.tiers.take()

    def finish(self, request: Request, end: int) -> None:
        assert request.node is not None
        assert request.table is not None
        held = self.tiers.cache.match(
            request.tokens, request.namespace, now=self.tiers.now, count_hit=False
        ).length
        end = max(end, held)
        self.tiers.finish(request.tokens[:end], request.node, request.table, request.namespace)

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        for request in self.waiting:
            self.settle(request)
        for request in self.running:
            self.finish(request, request.tokens.size)
        self.tiers.at_rest()
        self.tiers.cache.reset()
        assert self.tiers.cache.counts().free == self.tiers.cache.pool.num_pages
        assert self.tiers.cache.host.counts().free == self.tiers.cache.host.pool.num_pages


class PageOf1(TierMachine):
    page_size = 1


class PageOf4(TierMachine):
    page_size = 4


def run(machine: type[TierMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine", [PageOf1, PageOf4])
def test_tiers_hold_what_they_should(machine: type[TierMachine]) -> None:
    run(machine, examples=60, steps=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [PageOf1, PageOf4])
def test_tiers_hold_what_they_should_for_long(machine: type[TierMachine]) -> None:
    run(machine, examples=3000, steps=100)
