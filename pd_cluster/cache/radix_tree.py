"""Token sequences to pages: a radix tree whose edges are runs of whole pages of tokens.

RadixAttention (Zheng et al., 2024, "SGLang: Efficient Execution of Structured Language Model
Programs"). The tree knows which pages it holds but not what a pool is: its owner moves the pages'
states by what the methods return.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pd_cluster.cache.eviction import EvictionPolicy, EvictionQueue
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import Pages


class StaleNode(RuntimeError):
    """The node was evicted since it was matched: match again."""


class RadixTree:
    """`root` stands for the empty prefix of every namespace; it is never locked nor evicted.

    A namespace is part of the first key of a path, so that nothing matches across namespaces and
    one that has nothing cached takes no memory.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.queue = EvictionQueue(policy)
        self.num_nodes = 0
        empty = np.empty(0, np.int32)
        self.root = Node(b"", empty, empty, None, now=0.0, tick=0, priority=0)
        self._tick = 0
        self._locks = 0

    def walk(self, tokens: Tokens, namespace: str | None) -> tuple[list[Node], int]:
        """The nodes that hold the longest cached prefix of `tokens`, from the top, and its length.

        An edge that agrees only in part is split, so that the last node ends where the prefix does.
        Touches nothing that eviction looks at.
        """
        assert tokens.dtype == np.int32, "children are found by the bytes of int32 tokens"
        page_size = self.page_size
        end = tokens.size - tokens.size % page_size
        path: list[Node] = []
        children = self.root.children
        key = _namespace_key(namespace) + tokens[:page_size].tobytes()
        at = 0
        while at < end:
            child = children.get(key)
            if child is None:
                break
            edge = child.tokens
            shared = min(edge.size, end - at)
            differs = edge[:shared] != tokens[at : at + shared]
            first = int(differs.argmax())
            if differs[first]:
                shared = first - first % page_size
            at += shared
            if shared < edge.size:
                path.append(self._split(child, shared))
                break
            path.append(child)
            children = child.children
            key = tokens[at : at + page_size].tobytes()
        return path, at

    def touch(self, path: list[Node], *, now: float, count_hit: bool) -> None:
        """A request has used this path from the top."""
        tick = self._tick
        for node in path:
            tick += 1
            node.tick = tick
            node.last_access = now
            if count_hit:
                node.hit_count += 1
        self._tick = tick
        if path and path[-1].stamp:
            self.queue.offer(path[-1])

    def raise_priority(self, path: list[Node], priority: int) -> None:
        """Nodes used by several requests keep the highest priority."""
        for node in path:
            if node.priority < priority:
                node.priority = priority
                if node.stamp:
                    self.queue.offer(node)

    def insert(
        self,
        parent: Node,
        tokens: Tokens,
        pages: Pages,
        namespace: str | None,
        *,
        now: float,
        priority: int,
        hits: int = 0,
    ) -> Node:
        """A new leaf under `parent`, which has no child that begins with the same page.

        `tokens` is a whole number of pages, `pages` theirs; both are copied.
        """
        key = tokens[: self.page_size].tobytes()
        if parent is self.root:
            key = _namespace_key(namespace) + key
        assert key not in parent.children
        self._tick += 1
        node = Node(
            key, tokens.copy(), pages.copy(), parent, now=now, tick=self._tick, priority=priority
        )
        node.hit_count = hits
        parent.children[key] = node
        self.num_nodes += 1
        self.queue.withdraw(parent)
        self.queue.offer(node)
        return node

    def lock(self, node: Node) -> list[Node]:
        """Protect the prefix that ends with `node`. Returns the nodes that were unlocked before.

        Raises:
            StaleNode: the node was evicted.
        """
        return self._lock_up_to(self.root, node)

    def unlock(self, node: Node) -> list[Node]:
        """Undo one `lock`. Returns the nodes that are unlocked now."""
        unlocked = []
        if node is not self.root:
            self._locks -= 1
        while node.parent is not None:
            assert node.lock_ref > 0, "unlocked more often than locked"
            node.lock_ref -= 1
            if not node.lock_ref:
                unlocked.append(node)
                if not node.children:
                    self.queue.offer(node)
            node = node.parent
        assert node is self.root, "an evicted node was locked"
        return unlocked

    def move_lock(self, old: Node, new: Node) -> list[Node]:
        """Move a lock to a node below `old` (or to `old` itself). Returns as `lock` does.

        Raises:
            StaleNode: the new node was evicted.
        """
        locked = self._lock_up_to(old, new)
        if old is not self.root and new is not old:
            self._locks -= 1
        return locked

    def evict(self) -> tuple[Node, Node]:
        """Take out the next unlocked leaf; there must be one. Its tokens and pages stay.

        Returns it and the node that was its parent.
        """
        node = self.queue.pop()
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_nodes -= 1
        if not parent.children and not parent.lock_ref and parent is not self.root:
            self.queue.offer(parent)
        return node, parent

    def drop_unlocked(self) -> list[Node]:
        """Take out every unlocked node."""
        dropped = [node for node in self.nodes() if not node.lock_ref]
        for node in dropped:
            self.queue.withdraw(node)
            assert node.parent is not None
            del node.parent.children[node.key]
        for node in dropped:
            node.parent = None
        self.queue.compact()
        self.num_nodes -= len(dropped)
        return dropped

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def namespace(self, node: Node) -> str | None:
        """The namespace of a node that is in the tree."""
        while node.parent is not None and node.parent is not self.root:
            node = node.parent
        return self.namespace_of(node)

    def namespace_of(self, top: Node) -> str | None:
        """The namespace of a node that is, or was, right below the root."""
        prefix = top.key[: -self.page_size * 4]
        return prefix[1:].decode() if prefix else None

    def validate(self) -> None:
        """Check every invariant of the tree; O(nodes)."""
        assert not self.root.lock_ref
        assert not self.root.stamp
        seen = 0
        locks = sum(child.lock_ref for child in self.root.children.values())
        candidates = set()
        for node in self.nodes():
            seen += 1
            assert node.parent is not None
            assert node.parent.children[node.key] is node
            assert node.tokens.size == node.pages.size * self.page_size > 0
            assert node.key.endswith(node.tokens[: self.page_size].tobytes())
            if node.parent is not self.root:
                assert len(node.key) == self.page_size * 4
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref >= below
            if not node.children and not node.lock_ref:
                candidates.add(id(node))
            else:
                assert not node.stamp
        assert seen == self.num_nodes
        # Each lock counts once in the topmost node of its path.
        assert locks == self._locks
        queued = [id(node) for node in self.queue.nodes()]
        assert len(queued) == len(candidates) == len(self.queue)
        assert set(queued) == candidates

    def _lock_up_to(self, end: Node, node: Node) -> list[Node]:
        if node.parent is None and node is not self.root:
            raise StaleNode("the node was evicted")
        locked = []
        if node is not end:
            self._locks += 1
        while node is not end:
            if not node.lock_ref:
                locked.append(node)
                self.queue.withdraw(node)
            node.lock_ref += 1
            assert node.parent is not None, "a lock moves only downwards"
            node = node.parent
        return locked

    def _split(self, node: Node, length: int) -> Node:
        """Cut the edge after `length` tokens. Returns the new upper part; `node` is the lower."""
        num_pages = length // self.page_size
        parent = node.parent
        assert parent is not None
        upper = Node(
            node.key,
            node.tokens[:length].copy(),
            node.pages[:num_pages].copy(),
            parent,
            now=node.created,
            tick=node.tick,
            priority=node.priority,
        )
        upper.last_access = node.last_access
        upper.hit_count = node.hit_count
        upper.lock_ref = node.lock_ref
        parent.children[node.key] = upper
        # Copies, not views: a view would keep the whole edge alive after one part is evicted.
        node.tokens = node.tokens[length:].copy()
        node.pages = node.pages[num_pages:].copy()
        node.key = node.tokens[: self.page_size].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        self.num_nodes += 1
        return upper


def _namespace_key(namespace: str | None) -> bytes:
    """What precedes the first page's bytes in a top key: nothing, or a mark and the name.

    The page's bytes are of fixed length, so no two namespaces share a key.
    """
    return b"" if namespace is None else b":" + namespace.encode()
