"""The prefix cache against a naive model: a dictionary from prefix to page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

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

from pd_cluster.cache.events import PagesCleared, PagesRemoved, PagesStored
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node
from pd_cluster.cache.page_pool import OutOfPages, PageCounts, PagePool, Pages
from pd_cluster.cache.prefix_cache import PrefixCache

Prefix: TypeAlias = tuple[str | None, tuple[int, ...]]

POLICIES = ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"]
# Kinds of page that agree in their first token, so that pages differ inside.
pages_of_tokens = st.lists(st.integers(0, 2), max_size=5)
namespaces = st.sampled_from([None, "a"])


@dataclass(eq=False)
class Sequence:
    namespace: str | None
    tokens: np.ndarray
    table: Pages
    node: Node
    locked: int  # tokens
    priority: int


class CacheMachine(RuleBasedStateMachine):
    page_size: int
    # Of all examples of a class, to tell how long a run really was.
    operations: ClassVar[int] = 0

    @initialize(policy=st.sampled_from(POLICIES), num_pages=st.integers(3, 24))
    def start_worker(self, policy: str, num_pages: int) -> None:
        self.num_pages = num_pages
        self.cache = PrefixCache(
            PagePool(num_pages),
            self.page_size,
            make_eviction_policy(policy, {}),
            record_events=True,
        )
        self.now = 0.0
        self.cached: dict[Prefix, int] = {}
        self.written: dict[int, Prefix] = {}  # what the memory of a page holds
        self.sequences: list[Sequence] = []
        self.flights: list[Pages] = []

    # -- the model

    def prefixes(self, tokens: np.ndarray, namespace: str | None) -> list[Prefix]:
        values = tuple(tokens.tolist())
        ends = range(self.page_size, len(values) + 1, self.page_size)
        return [(namespace, values[:end]) for end in ends]

    def resident(self, tokens: np.ndarray, namespace: str | None) -> list[int]:
        pages = []
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix])
        return pages

    def locked(self) -> set[Prefix]:
        return {
            prefix
            for sequence in self.sequences
            for prefix in self.prefixes(sequence.tokens[: sequence.locked], sequence.namespace)
        }

    def flying(self) -> Counter[int]:
        return Counter(page for flight in self.flights for page in flight.tolist())

    def private(self) -> set[int]:
        return {
            page
            for sequence in self.sequences
            for page in sequence.table[sequence.locked // self.page_size :].tolist()
        }

    def expected_counts(self) -> PageCounts:
        flying = set(self.flying())
        locked = self.locked()
        protected = {page for prefix, page in self.cached.items() if prefix in locked} - flying
        evictable = {page for prefix, page in self.cached.items() if prefix not in locked} - flying
        private = self.private() - flying
        return PageCounts(
            free=self.num_pages - len(flying) - len(protected) - len(evictable) - len(private),
            private=len(private),
            in_flight=len(flying),
            protected=len(protected),
            evictable=len(evictable),
        )

    def forget_removed(self) -> set[int]:
        """Take what the cache says that it dropped out of the model."""
        locked = self.locked()
        removed: set[int] = set()
        for event in self.cache.take_events():
            match event:
                case PagesRemoved(pages):
                    removed.update(pages.tolist())
                case PagesCleared():
                    removed.update(self.cached.values())
                case PagesStored():
                    raise AssertionError("nothing was published")
        gone = {prefix for prefix, page in self.cached.items() if page in removed}
        assert len(gone) == len(removed), "only what was cached can be removed"
        assert not gone & locked, "a locked prefix was dropped"
        for prefix in gone:
            del self.cached[prefix]
        for namespace, values in self.cached:
            above = values[: -self.page_size]
            assert not above or (namespace, above) in self.cached, "a prefix lost its start"
        return removed

    def write(self, sequence: Sequence, first: int) -> None:
        """Compute the KV of the full pages from `first` on."""
        prefixes = self.prefixes(sequence.tokens, sequence.namespace)
        for prefix, page in zip(prefixes[first:], sequence.table[first:].tolist(), strict=False):
            self.written[page] = prefix

    def allocate(self, n: int) -> Pages | None:
        before = self.expected_counts()
        flying = self.flying()
        if n > before.free + before.evictable:
            with pytest.raises(OutOfPages) as caught:
                self.cache.allocate(n, self.now)
            assert caught.value.free == before.free + before.evictable
            assert not self.forget_removed(), "a refused allocation evicted"
            return None
        pages = self.cache.allocate(n, self.now)
        removed = self.forget_removed()
        assert bool(removed) == (n > before.free)
        assert not set(pages.tolist()) & (set(flying) | self.private() | set(self.cached.values()))
        return pages

    def build(self, kinds: list[int], tail: int) -> np.ndarray:
        tokens = []
        for kind in kinds:
            page = [kind // 2] * self.page_size
            page[-1] = kind
            tokens += page
        tokens += [0] * (tail % self.page_size)
        return np.array(tokens, np.int32)

    # -- what can happen

    @rule(kinds=pages_of_tokens, tail=st.integers(0, 15), namespace=namespaces, p=st.integers(0, 2))
    def arrive(self, kinds: list[int], tail: int, namespace: str | None, p: int) -> None:
        self.now += 1.0
        tokens = self.build(kinds, tail)
        match = self.cache.match(tokens, namespace, now=self.now, count_hit=True)
        self.cache.lock(match.node)
        sequence = Sequence(namespace, tokens, match.pages, match.node, match.length, p)
        self.sequences.append(sequence)
        pages = self.allocate(-(-tokens.size // self.page_size) - match.pages.size)
        if pages is None:
            self.sequences.remove(sequence)
            self.cache.unlock(match.node)
            return
        sequence.table = np.concatenate([match.pages, pages])
        self.write(sequence, match.pages.size)

    @rule(kinds=pages_of_tokens, tail=st.integers(0, 15), namespace=namespaces)
    def peek(self, kinds: list[int], tail: int, namespace: str | None) -> None:
        tokens = self.build(kinds, tail)
        match = self.cache.match(tokens, namespace, now=self.now, count_hit=False)
        expected = self.resident(tokens, namespace)
        assert match.pages.tolist() == expected
        assert match.length == len(expected) * self.page_size
        prefixes = self.prefixes(tokens, namespace)
        for page, prefix in zip(expected, prefixes, strict=False):
            assert self.written[page] == prefix, "a cached page was overwritten"

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), kinds=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def grow(self, data: st.DataObject, kinds: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        more = self.build(kinds, 0)
        full = sequence.tokens.size // self.page_size
        longer = np.concatenate([sequence.tokens, more])
        pages = self.allocate(-(-longer.size // self.page_size) - sequence.table.size)
        if pages is not None:
            sequence.tokens = longer
            sequence.table = np.concatenate([sequence.table, pages])
            self.write(sequence, full)

    def publish(self, sequence: Sequence, end: int) -> None:
        """What a publication of the first `end` tokens does to the model."""
        for i, prefix in enumerate(self.prefixes(sequence.tokens[:end], sequence.namespace)):
            page = self.cached.setdefault(prefix, int(sequence.table[i]))
            sequence.table[i] = page
        sequence.locked = end // self.page_size * self.page_size

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish_some(self, data: st.DataObject) -> None:
        self.now += 1.0
        sequence = data.draw(st.sampled_from(self.sequences))
        end = data.draw(st.integers(sequence.locked, sequence.tokens.size))
        stored_before = set(self.cached.values())
        published = self.cache.publish(
            sequence.tokens[:end],
            sequence.table,
            sequence.namespace,
            now=self.now,
            priority=sequence.priority,
        )
        self.cache.move_lock(sequence.node, published.node)
        sequence.node = published.node
        own = sequence.table.copy()
        self.publish(sequence, end)
        assert published.length == sequence.locked
        assert published.pages.tolist() == sequence.table.tolist()
        assert published.duplicates.tolist() == own[own != sequence.table].tolist()
        stored = set(self.cached.values()) - stored_before
        events = self.cache.take_events()
        assert {
            page for event in events if isinstance(event, PagesStored) for page in event.pages
        } == stored

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), how=st.sampled_from(["finished", "prompt only", "aborted"]))
    def end(self, data: st.DataObject, how: str) -> None:
        self.now += 1.0
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        if how == "aborted":
            self.cache.release(sequence.table[sequence.locked // self.page_size :])
            self.cache.unlock(sequence.node)
            return
        end = sequence.tokens.size
        if how == "prompt only":
            end = data.draw(st.integers(sequence.locked, end))
        self.cache.finish(
            sequence.tokens[:end],
            sequence.table,
            sequence.node,
            sequence.namespace,
            now=self.now,
            priority=sequence.priority,
        )
        self.publish(sequence, end)
        self.cache.take_events()

    @rule(data=st.data())
    def take_off(self, data: st.DataObject) -> None:
        owned = sorted(self.private() | set(self.cached.values()))
        if not owned:
            return
        chosen = data.draw(st.lists(st.sampled_from(owned), min_size=1, max_size=4, unique=True))
        flight = np.array(chosen, np.int32)
        self.cache.pool.begin_flight(flight)
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def touch_down(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.cache.pool.end_flight(flight)

    @rule()
    def flush(self) -> None:
        before = self.expected_counts()
        assert self.cache.reset() == before.evictable
        self.forget_removed()
        assert set(self.cached) <= self.locked()

    # -- what must hold

    @invariant()
    def counts_are_the_models(self) -> None:
        type(self).operations += 1
        assert self.cache.counts() == self.expected_counts()
        self.cache.validate()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.sequences:
            self.cache.release(sequence.table[sequence.locked // self.page_size :])
            self.cache.unlock(sequence.node)
        for flight in self.flights:
            self.cache.pool.end_flight(flight)
        self.cache.validate()
        counts = self.cache.counts()
        assert (counts.private, counts.in_flight, counts.protected) == (0, 0, 0)
        self.cache.reset()
        assert self.cache.counts().free == self.num_pages


class PageOf1(CacheMachine):
    page_size = 1


class PageOf4(CacheMachine):
    page_size = 4


class PageOf16(CacheMachine):
    page_size = 16


MACHINES = [PageOf1, PageOf4, PageOf16]


def run(machine: type[CacheMachine], examples: int, steps: int) -> None:
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


@pytest.mark.parametrize("machine", MACHINES)
def test_cache_and_model_agree(machine: type[CacheMachine]) -> None:
    """Case 16, and the invariants of the design that concern pages."""
    run(machine, examples=150, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_cache_and_model_agree_for_long(machine: type[CacheMachine]) -> None:
    """A million operations over the three page sizes."""
    machine.operations = 0
    run(machine, examples=6000, steps=100)
    assert machine.operations >= 1_000_000 / len(MACHINES)
