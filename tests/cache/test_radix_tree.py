from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.radix_tree import RadixTree, StaleNode


def ids(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text(node: Node) -> str:
    return bytes(node.tokens.tolist()).decode()


class Tree(RadixTree):
    """Letters for tokens; a page's number is that of its first letter's place in `put`."""

    def __init__(self, page_size: int = 1) -> None:
        super().__init__(page_size, make_eviction_policy("lru", {}))
        self.now = 0.0

    def put(self, prefix: str) -> Node:
        self.now += 1.0
        tokens = ids(prefix)
        path, length = self.walk(tokens, None)
        parent = path[-1] if path else self.root
        if length == tokens.size:
            return parent
        pages = np.arange(length // self.page_size, tokens.size // self.page_size, dtype=np.int32)
        return self.insert(parent, tokens[length:], pages, None, now=self.now, priority=0)

    def find(self, prefix: str) -> tuple[list[str], int]:
        path, length = self.walk(ids(prefix), None)
        return [text(node) for node in path], length

    def edges(self) -> set[tuple[str, tuple[int, ...]]]:
        return {(text(node), tuple(node.pages.tolist())) for node in self.nodes()}


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.validate()


def test_an_empty_tree_matches_nothing(tree: Tree) -> None:
    assert tree.find("ABC") == ([], 0)
    assert tree.find("") == ([], 0)


def test_a_match_inside_an_edge_splits_it(tree: Tree) -> None:
    lower = tree.put("ABCDEF")
    assert tree.find("ABCX") == (["ABC"], 3)
    assert tree.edges() == {("ABC", (0, 1, 2)), ("DEF", (3, 4, 5))}
    # The old node is the lower part: who holds it still holds the whole prefix.
    assert text(lower) == "DEF"
    assert tree.find("ABCDEFG") == (["ABC", "DEF"], 6)
    assert tree.find("ABCDE") == (["ABC", "DE"], 5)
    assert tree.find("A") == (["A"], 1)
    assert tree.edges() == {("A", (0,)), ("BC", (1, 2)), ("DE", (3, 4)), ("F", (5,))}


def test_a_whole_edge_is_matched_without_a_split(tree: Tree) -> None:
    tree.put("ABC")
    assert tree.find("ABC") == (["ABC"], 3)
    assert tree.find("ABCD") == (["ABC"], 3)
    assert tree.num_nodes == 1


def test_a_split_inherits_locks_and_scores(tree: Tree) -> None:
    node = tree.put("ABCD")
    tree.touch([node], now=5.0, count_hit=True)
    tree.raise_priority([node], 7)
    tree.lock(node)
    tree.lock(node)
    path, _ = tree.walk(ids("AB"), None)
    for part in (path[0], node):
        assert (part.lock_ref, part.hit_count, part.priority) == (2, 1, 7)
        assert (part.created, part.last_access, part.tick) == (1.0, 5.0, node.tick)
    tree.lock(path[0])
    assert (path[0].lock_ref, node.lock_ref) == (3, 2)
    assert tree.unlock(node) == []
    assert tree.unlock(node) == [node]
    assert tree.unlock(path[0]) == [path[0]]


@pytest.mark.parametrize("page_size", [2, 4])
@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("rest", ["", "xxxxxxxx"])
def test_only_whole_pages_match(page_size: int, length: int, rest: str) -> None:
    tree = Tree(page_size)
    tree.put("ABCDEFGH")
    assert tree.find("ABCDEFGH"[:length] + rest)[1] == length // page_size * page_size
    tree.validate()
    assert tree.find("ABCDEFGHI")[1] == 8


def test_siblings_may_share_tokens_of_a_page() -> None:
    tree = Tree(4)
    for prefix in ("ABCD", "ABCE", "ABXX", "ABCDEFGH"):
        tree.put(prefix)
    assert tree.num_nodes == 4
    for prefix in ("ABCD", "ABCE", "ABXX", "ABCDEFGH"):
        assert tree.find(prefix)[1] == len(prefix)
    assert tree.find("ABCX")[1] == 0
    tree.validate()


def test_a_lock_goes_to_the_root_and_moves_down(tree: Tree) -> None:
    top, middle, leaf = tree.put("A"), tree.put("AB"), tree.put("ABC")
    assert tree.lock(middle) == [middle, top]
    assert (top.lock_ref, middle.lock_ref, leaf.lock_ref) == (1, 1, 0)
    assert tree.move_lock(middle, leaf) == [leaf]
    assert (top.lock_ref, middle.lock_ref, leaf.lock_ref) == (1, 1, 1)
    assert tree.move_lock(leaf, leaf) == []
    tree.validate()
    assert tree.unlock(leaf) == [leaf, middle, top]
    assert tree.lock(tree.root) == []
    assert tree.move_lock(tree.root, top) == [top]
    tree.validate()
    assert tree.unlock(top) == [top]
    assert tree.unlock(tree.root) == []


def test_unbalanced_unlocks_are_our_own_bug() -> None:
    tree = Tree()
    node = tree.put("A")
    tree.lock(node)
    tree.unlock(node)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        tree.unlock(node)


def test_evicted_and_dropped_nodes_are_stale(tree: Tree) -> None:
    tree.put("AB")
    assert tree.evict()[0].parent is None
    node = tree.put("AB")
    below = tree.put("ABC")
    assert set(tree.drop_unlocked()) == {node, below}
    for stale in (node, below):
        with pytest.raises(StaleNode):
            tree.lock(stale)
        with pytest.raises(StaleNode):
            tree.move_lock(tree.root, stale)
    assert tree.find("AB") == ([], 0)


def test_locked_nodes_and_what_is_above_them_are_not_dropped(tree: Tree) -> None:
    node = tree.put("ABCD")
    tree.put("ABXY")
    tree.put("Q")
    tree.lock(node)
    assert {text(dropped) for dropped in tree.drop_unlocked()} == {"XY", "Q"}
    assert tree.find("ABCD") == (["AB", "CD"], 4)
    tree.unlock(node)
    assert text(tree.evict()[0]) == "CD"
    assert text(tree.evict()[0]) == "AB"


def test_the_tree_keeps_its_own_arrays(tree: Tree) -> None:
    tokens, pages = ids("ABC"), np.arange(3, dtype=np.int32)
    node = tree.insert(tree.root, tokens, pages, None, now=1.0, priority=0)
    tokens[:] = 0
    pages[:] = 0
    assert text(node) == "ABC"
    assert node.pages.tolist() == [0, 1, 2]
    tree.find("AX")
    # After a split neither part keeps the memory of the whole.
    assert all(n.tokens.base is None and n.pages.base is None for n in tree.nodes())


def test_other_types_of_tokens_are_refused(tree: Tree) -> None:
    with pytest.raises(AssertionError, match="int32"):
        tree.walk(np.arange(4), None)  # type: ignore[arg-type]
