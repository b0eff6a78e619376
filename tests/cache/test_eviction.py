from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.radix_tree import RadixTree

POLICIES = ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"]


def make_tree(policy: str, config: dict[str, object] | None = None) -> RadixTree:
    return RadixTree(1, make_eviction_policy(policy, config or {}))


def add(tree: RadixTree, *tokens: int, now: float, priority: int = 0) -> Node:
    path, length = tree.walk(array(*tokens), None)
    rest = array(*tokens)[length:]
    parent = path[-1] if path else tree.root
    return tree.insert(parent, rest, np.zeros_like(rest), None, now=now, priority=priority)


def hit(tree: RadixTree, *tokens: int, now: float) -> None:
    path, _ = tree.walk(array(*tokens), None)
    tree.touch(path, now=now, count_hit=True)


def array(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def order(tree: RadixTree) -> list[int]:
    evicted = []
    while len(tree.queue):
        evicted.append(int(tree.evict()[0].tokens[0]))
    tree.validate()
    return evicted


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [3, 2, 4, 1]),
        ("lfu", [3, 4, 1, 2]),
        ("slru", [3, 4, 1, 2]),
        ("priority", [2, 3, 4, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("mru", [1, 4, 2, 3]),
        ("filo", [4, 3, 2, 1]),
    ],
)
def test_the_order_of_each_policy(policy: str, expected: list[int]) -> None:
    tree = make_tree(policy)
    for token, priority in ((1, 5), (2, 0), (3, 3), (4, 3)):
        add(tree, token, now=token, priority=priority)
    for now, token in enumerate((2, 2, 2, 4, 1), start=10):
        hit(tree, token, now=now)
    assert order(tree) == expected


@pytest.mark.parametrize("policy", ["lfu", "slru", "priority", "fifo", "filo"])
def test_ties_go_to_the_least_recently_used(policy: str) -> None:
    tree = make_tree(policy)
    for token in (1, 2, 3):
        add(tree, token, now=0.0)
    for now, token in enumerate((3, 1, 2), start=1):
        hit(tree, token, now=now)
    assert order(tree) == [3, 1, 2]


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"])
def test_at_one_instant_the_order_of_use_decides(policy: str) -> None:
    tree = make_tree(policy)
    for token in (1, 2, 3):
        add(tree, token, now=7.0)
    for token in (3, 1, 2):
        hit(tree, token, now=7.0)
    assert order(tree) == [3, 1, 2]


def test_slru_protects_from_the_threshold_on() -> None:
    tree = make_tree("slru", {"protected_threshold": 3})
    for token in (1, 2, 3):
        add(tree, token, now=token)
    for now in (4, 5, 6):
        hit(tree, 1, now=now)
    for now in (7, 8):
        hit(tree, 2, now=now)
    assert order(tree) == [3, 2, 1]


def test_a_node_keeps_the_highest_priority_of_its_users() -> None:
    tree = make_tree("priority")
    add(tree, 1, now=1.0, priority=1)
    add(tree, 2, now=2.0, priority=2)
    path, _ = tree.walk(array(1), None)
    tree.raise_priority(path, 3)
    tree.raise_priority(path, 0)
    assert order(tree) == [2, 1]


def test_a_parent_becomes_a_candidate_when_its_last_child_goes() -> None:
    tree = make_tree("lru")
    add(tree, 1, now=1.0)
    add(tree, 1, 2, now=2.0)
    add(tree, 1, 3, now=3.0)
    add(tree, 9, now=4.0)
    # The parent is the oldest, but shadowed until both children are gone.
    assert order(tree) == [2, 3, 1, 9]
    assert tree.num_nodes == 0


def test_a_locked_leaf_is_no_candidate() -> None:
    tree = make_tree("lru")
    first = add(tree, 1, now=1.0)
    add(tree, 2, now=2.0)
    tree.lock(first)
    tree.lock(first)
    assert order(tree) == [2]
    tree.unlock(first)
    assert order(tree) == []
    tree.unlock(first)
    assert order(tree) == [1]


@pytest.mark.parametrize(
    ("policy", "config", "message"),
    [
        ("LRU", {}, "unknown eviction policy 'LRU'; allowed: lru, lfu, slru, priority, fifo,"),
        ("lru", {"a": 1}, "eviction policy 'lru' has no key 'a'; allowed: none"),
        (
            "slru",
            {"protected_treshold": 4},
            "'slru' has no key 'protected_treshold'; allowed: protected_threshold",
        ),
        ("slru", {"protected_threshold": "4"}, "protected_threshold of .*'slru' must be an int"),
        ("slru", {"protected_threshold": True}, "must be an integer, not True"),
        ("slru", {"protected_threshold": 0}, "'slru' must be at least 1, not 0"),
    ],
)
def test_a_bad_configuration_is_refused(
    policy: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_eviction_policy(policy, config)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_victim_is_the_one_that_a_look_at_all_leaves_finds(policy: str) -> None:
    rng = np.random.default_rng(POLICIES.index(policy))
    tree = make_tree(policy)
    locked: list[Node] = []
    for now in itertools.count():
        tokens = rng.integers(0, 3, int(rng.integers(1, 7))).astype(np.int32)
        path, length = tree.walk(tokens, None)
        action = rng.random()
        if action < 0.3:
            # Times are coarse, so that there are ties.
            tree.touch(path, now=now // 4, count_hit=True)
        elif action < 0.6:
            priority = int(rng.integers(0, 3))
            tree.touch(path, now=now // 4, count_hit=False)
            tree.raise_priority(path, priority)
            if length < tokens.size:
                parent = path[-1] if path else tree.root
                rest = tokens[length:]
                tree.insert(parent, rest, rest, None, now=now // 4, priority=priority)
        elif action < 0.7 and path:
            tree.lock(path[-1])
            locked.append(path[-1])
        elif action < 0.8 and locked:
            tree.unlock(locked.pop(int(rng.integers(len(locked)))))
        elif len(tree.queue):
            leaves = [n for n in tree.nodes() if not n.children and not n.lock_ref]
            expected = min(
                leaves, key=lambda n: (tree.queue.policy.score(n), n.last_access, n.tick)
            )
            assert tree.evict()[0] is expected
        if now % 50 == 0:
            tree.validate()
        if now == 3000:
            break


def test_evicting_one_of_50000_leaves_visits_a_handful() -> None:
    """Case 17."""
    tree = make_tree("lru")
    leaves = [add(tree, token, 0, now=0.0) for token in range(50_000)]
    before = tree.queue.visits
    tree.evict()
    assert tree.queue.visits - before == 1
    # Use of a few leaves leaves a few entries that are no longer valid, at most.
    for leaf in leaves[1:11]:
        tree.lock(leaf)
    for leaf in leaves[1:6]:
        tree.unlock(leaf)
    before = tree.queue.visits
    tree.evict()
    assert tree.queue.visits - before <= 11
    # And however much is used between, the visits stay in proportion to use and evictions.
    before = tree.queue.visits
    for leaf in leaves[100:20_100]:
        hit(tree, int(leaf.tokens[0]), 0, now=1.0)
    for _ in range(1000):
        tree.evict()
    assert tree.queue.visits - before <= 20_000 + 1000 + 20


def test_much_use_of_few_leaves_is_not_remembered() -> None:
    tree = make_tree("lru")
    for token in range(10):
        add(tree, token, now=0.0)
    for now in range(10_000):
        hit(tree, now % 10, now=now)
    before = tree.queue.visits
    tree.evict()
    assert tree.queue.visits - before <= 2 * 10 + 64


def test_dropped_nodes_are_not_kept_alive() -> None:
    tree = make_tree("lru")
    tokens = weakref.ref(add(tree, 1, 2, 3, now=0.0).tokens)
    assert tokens() is not None
    tree.drop_unlocked()
    gc.collect()
    assert tokens() is None
