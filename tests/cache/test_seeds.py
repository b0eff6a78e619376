"""The nine steps of RadixAttention, and the rules that SGLang states for eviction policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import pytest

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import PagePool, Pages
from pd_cluster.cache.prefix_cache import PrefixCache

Shape: TypeAlias = dict[str, "Shape"]


def ids(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class Engine:
    """Serves requests one after another; a page is one letter."""

    def __init__(self, pages: int, policy: str = "lru", **config: int) -> None:
        self.cache = PrefixCache(PagePool(pages), 1, make_eviction_policy(policy, config))
        self.now = 0.0

    def start(self, prompt: str) -> tuple[int, Node, Pages]:
        self.now += 1.0
        match = self.cache.match(ids(prompt), now=self.now, count_hit=True)
        self.cache.lock(match.node)
        own = self.cache.allocate(len(prompt) - match.length, self.now)
        return match.length, match.node, np.concatenate([match.pages, own])

    def serve(self, text: str, priority: int = 0) -> int:
        """A request whose prompt and answer are `text`; how much of it was cached."""
        cached, node, table = self.start(text)
        self.cache.finish(ids(text), table, node, now=self.now, priority=priority)
        self.cache.validate()
        return cached

    def cached(self, text: str) -> int:
        return self.cache.match(ids(text), now=self.now, count_hit=False).length

    def shape(self) -> Shape:
        def below(node: Node) -> Shape:
            return {
                bytes(child.tokens.tolist()).decode(): below(child)
                for child in node.children.values()
            }

        return below(self.cache.tree.root)

    def evicted_first(self, prompts: Iterable[str]) -> str:
        """Which of the cached prompts goes when one page is needed."""
        self.cache.evict(1, self.now)
        (gone,) = [prompt for prompt in prompts if self.cached(prompt) < len(prompt)]
        return gone


def test_nine_steps() -> None:
    """Insert, reuse, split, evict, branch at the root, share a batch, come back, branch a leaf."""
    engine = Engine(pages=43)
    system, hello, how = "sys.", "hello?-hi there, you", "how? "
    what, answer = "what?", "AI is software, Sir."
    assert engine.shape() == {}  # 1

    assert engine.serve(system + hello) == 0  # 2: one edge
    assert engine.shape() == {system + hello: {}}

    assert engine.serve(system + hello + how) == 24  # 3: the second turn hangs below the first
    assert engine.shape() == {system + hello: {how: {}}}

    assert engine.serve(system + what) == 4  # 4: another chat splits the edge
    assert engine.shape() == {system: {hello: {how: {}}, what: {}}}

    assert engine.serve(system + what + answer) == 9  # 5: it goes on, and the first chat has to go
    assert engine.shape() == {system: {what: {answer: {}}}}

    shots = "Q:A; "
    assert engine.serve(shots + "xx") == 0  # 6: nothing shared: a branch at the root
    assert set(engine.shape()) == {system, shots + "xx"}

    for question in ("yy", "zz", "ww"):  # 7: a batch with the same examples
        assert engine.serve(shots + question) == 5
    assert engine.shape()[shots] == {"xx": {}, "yy": {}, "zz": {}, "ww": {}}

    # 8: the first chat again: the second one goes, and only what was evicted is computed.
    assert engine.serve(system + hello + how) == 4
    assert engine.shape()[system] == {hello + how: {}}

    # 9: several answers to one question: its siblings go, it is held by its requests.
    running = [engine.start(shots + "yy" + sample) for sample in ("a1", "b2", "c3")]
    assert [cached for cached, _, _ in running] == [7, 7, 7]
    assert engine.shape()[shots] == {"yy": {}}
    for (_, node, table), sample in zip(running, ("a1", "b2", "c3"), strict=True):
        engine.cache.finish(ids(shots + "yy" + sample), table, node, now=engine.now)
    assert engine.shape()[shots] == {"yy": {"a1": {}, "b2": {}, "c3": {}}}
    engine.cache.validate()


ALL = ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"]


@pytest.mark.parametrize("policy", ALL)
def test_no_score_pins_a_node(policy: str) -> None:
    """A policy scores and no more: if everything else does not suffice, all goes."""
    engine = Engine(8, policy)
    for _ in range(5):
        engine.serve("AAAA", priority=9)
    engine.serve("BBBB")
    assert engine.serve("CCCCCCCC") == 0
    assert engine.shape() == {"CCCCCCCC": {}}


@pytest.mark.parametrize("policy", ALL)
def test_only_unlocked_leaves_go_and_then_their_parents(policy: str) -> None:
    engine = Engine(12, policy)
    engine.serve("AAxx")
    engine.serve("AAyy")
    cached, node, table = engine.start("AAxxzz")
    assert cached == 4
    engine.cache.evict(12, engine.now)
    assert engine.shape() == {"AA": {"xx": {}}}, "what a request holds, and all above it"
    engine.cache.finish(ids("AAxxzz"), table, node, now=engine.now)
    engine.cache.evict(1, engine.now)
    assert engine.shape() == {"AA": {"xx": {}}}, "from the end of the branch"
    engine.cache.evict(3, engine.now)
    assert engine.shape() == {}, "the parent followed its leaf"


@pytest.mark.parametrize("policy", ["lfu", "slru", "priority"])
def test_ties_fall_back_to_the_least_recently_used(policy: str) -> None:
    engine = Engine(8, policy)
    for prompt in ("AA", "BB", "CC", "BB", "CC", "AA"):
        engine.serve(prompt)
    assert engine.evicted_first(["AA", "BB", "CC"]) == "BB"


def test_lfu_keeps_a_hot_set_through_a_burst() -> None:
    for policy, stays in (("lfu", True), ("lru", False)):
        engine = Engine(10, policy)
        for _ in range(3):
            engine.serve("HOT!")
        for burst in ("aaa", "bbb", "ccc", "ddd"):
            engine.serve(burst)
        assert (engine.cached("HOT!") == 4) is stays


@pytest.mark.parametrize("threshold", [1, 2, 4])
def test_slru_promotes_by_its_threshold(threshold: int) -> None:
    """On probation before protected, whatever was used last."""
    engine = Engine(8, "slru", protected_threshold=threshold)
    for _ in range(threshold + 1):
        engine.serve("AA")
    for _ in range(threshold):
        engine.serve("BB")
    assert engine.evicted_first(["AA", "BB"]) == "BB"


def test_without_priorities_the_policy_priority_is_lru() -> None:
    order = ["AA", "BB", "CC", "AA", "DD", "BB"]
    shapes = []
    for policy in ("priority", "lru"):
        engine = Engine(6, policy)
        shapes.append([(engine.serve(prompt), engine.shape()) for prompt in order])
    assert shapes[0] == shapes[1]


def test_priority_is_the_highest_of_those_that_used_the_node() -> None:
    engine = Engine(8, "priority")
    engine.serve("AA", priority=1)
    engine.serve("BB", priority=2)
    engine.serve("AA", priority=3)
    engine.serve("BB", priority=0)
    assert engine.evicted_first(["AA", "BB"]) == "BB"


def test_a_misspelt_key_stops_the_start_and_is_named() -> None:
    with pytest.raises(ValueError, match="'slru' has no key 'protected_treshold'"):
        make_eviction_policy("slru", {"protected_treshold": 4})
