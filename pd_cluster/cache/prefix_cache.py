"""Page pool, radix tree and locks of one worker: the one object that a worker uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pd_cluster.cache.events import CacheEvent, PagesCleared, PagesRemoved, PagesStored, Tier
from pd_cluster.cache.eviction import EvictionPolicy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import OutOfPages, PageCounts, PagePool, Pages
from pd_cluster.cache.radix_tree import RadixTree

_NO_PAGES: Pages = np.empty(0, np.int32)


class Match(NamedTuple):
    """The cached prefix of `length` tokens, its pages, and the node that a lock on it needs."""

    length: int
    pages: Pages
    node: Node


class Published(NamedTuple):
    """The page table to use from now on, of which the first `length` tokens are in the tree.

    `pages` has the length of the table that was given; what lies behind `length` tokens is still
    private. `duplicates` were released: no longer the sequence's own.
    """

    length: int
    pages: Pages
    node: Node
    duplicates: Pages


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Totals since the start, in tokens, but for `nodes`, which is now.

    `idle_before_eviction` (seconds) says how long the last evicted node had not been used.
    """

    queries: int
    hits: int
    evicted: int
    nodes: int
    idle_before_eviction: float


class PrefixCache:
    """Pages of prefixes that were computed or received, found by their tokens.

    A sequence's pages, from its arrival to its end (`|` is where its lock's node ends):

        match, lock      [tree tree |                              ]
        allocate         [tree tree | private private private      ]   KV is written or received
        publish          [tree tree | tree    tree    private      ]   the last page is not full
        move_lock        [tree tree   tree    tree  | private      ]
        finish           [tree tree   tree    tree  ] unlocked, the rest is free

    With `enabled=False` nothing is ever found nor kept: all pages stay private until the end.
    Times (`now`) are seconds of one clock, never going back. Errors of the pool (`PageStateError`)
    mean that a caller broke this order.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        policy: EvictionPolicy,
        *,
        enabled: bool = True,
        record_events: bool = False,
        tier: Tier = "device",
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        self.tree = RadixTree(page_size, policy)
        self.tier = tier  # said with every event
        self._events: list[CacheEvent] = []
        self._record_events = record_events
        self._queries = 0
        self._hits = 0
        self._evicted = 0
        self._idle_before_eviction = 0.0
        # Around each eviction, for whoever wants to know how long they take: a cache has no clock.
        self.stopwatch: Callable[[], AbstractContextManager[object]] = nullcontext

    def match(
        self, tokens: Tokens, namespace: str | None = None, *, now: float, count_hit: bool
    ) -> Match:
        """The longest cached prefix of `tokens` (int32), in whole pages.

        `count_hit` is true once in a request's life; false for a peek, which leaves statistics,
        hit counts and last accesses alone. The pages are safe only once the node is locked.
        """
        if not self.enabled:
            self._queries += tokens.size if count_hit else 0
            return Match(0, _NO_PAGES, self.tree.root)
        path, length = self.tree.walk(tokens, namespace)
        if count_hit:
            self._queries += tokens.size
            self._hits += length
            self.tree.touch(path, now=now, count_hit=True)
        if not path:
            return Match(0, _NO_PAGES, self.tree.root)
        return Match(length, _pages_of(path), path[-1])

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends with this node from being evicted.

        Raises:
            StaleNode: it was evicted since it was matched.
        """
        self._protect(self.tree.lock(node))

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node."""
        unlocked = self.tree.unlock(node)
        if unlocked:
            self.pool.unprotect(_pages_of(unlocked))

    def move_lock(self, old: Node, new: Node) -> None:
        """Move a lock to a longer prefix of the same sequence."""
        self._protect(self.tree.move_lock(old, new))

    def allocate(self, n: int, now: float) -> Pages:
        """Take `n` pages, which become private; evicts as much as that needs.

        Raises:
            OutOfPages: not even evicting everything would do; nothing was evicted.
        """
        missing = n - self.pool.free_count
        if missing > 0:
            if missing > self.pool.evictable_count:
                raise OutOfPages(n, self.available())
            self.evict(missing, now)
        return self.pool.allocate(n)

    def evict(self, num_pages: int, now: float) -> int:
        """Evict unlocked leaves until that many pages are free again, or none is left.

        Whole leaves go, so more may become free. Returns how many did.
        """
        with self.stopwatch():
            return self._evict(num_pages, now)

    def _evict(self, num_pages: int, now: float) -> int:
        victims: list[Node] = []
        parents: list[Node] = []
        freed = 0
        while freed < num_pages and len(self.tree.queue):
            node, parent = self.tree.evict()
            victims.append(node)
            parents.append(parent)
            freed += self.pool.count_idle(node.pages)
        if not victims:
            return 0
        self._evicting(victims, parents, now)
        pages = _pages_of(victims)
        self._evicted += pages.size * self.page_size
        self._idle_before_eviction = now - victims[-1].last_access
        if self._record_events:
            self._events.append(PagesRemoved(pages, self.tier))
        return self.pool.evict(pages)

    def publish(
        self,
        tokens: Tokens,
        pages: Pages,
        namespace: str | None = None,
        *,
        now: float,
        priority: int = 0,
        hits: int = 0,
    ) -> Published:
        """Put the full pages of `tokens` (int32) into the tree; their KV must be written.

        `pages` is the sequence's page table: the matched pages first, then its own private ones,
        at least one for each full page. Where the tree already has another page for a position
        the sequence's own is released: the table that is returned must replace the old one before
        the next `allocate`. Locks nothing: the caller moves its lock to the returned node. `hits`
        is what a new node was hit before, while it was cached elsewhere.
        """
        if not self.enabled:
            return Published(0, pages, self.tree.root, _NO_PAGES)
        num_full = tokens.size // self.page_size
        assert pages.size >= num_full, "a page table shorter than its tokens"
        path, length = self.tree.walk(tokens, namespace)
        self.tree.touch(path, now=now, count_hit=False)
        self.tree.raise_priority(path, priority)
        node = path[-1] if path else self.tree.root
        held = length // self.page_size
        duplicates = _NO_PAGES
        table = pages
        if held:
            cached = _pages_of(path)
            own = pages[:held]
            duplicates = own[own != cached]
            if duplicates.size:
                self.pool.free(duplicates)
                table = np.concatenate([cached, pages[held:]])
        if held < num_full:
            fresh = pages[held:num_full]
            self.pool.publish(fresh)
            rest = tokens[length : num_full * self.page_size]
            parent = node
            node = self.tree.insert(
                parent, rest, fresh, namespace, now=now, priority=priority, hits=hits
            )
            if self._record_events:
                self._events.append(_stored(node, parent, namespace, self.tier))
        return Published(num_full * self.page_size, table, node, duplicates)

    def release(self, pages: Pages) -> None:
        """Free private pages; those in flight follow when their last flight ends."""
        self.pool.free(pages)

    def finish(
        self,
        tokens: Tokens,
        pages: Pages,
        node: Node,
        namespace: str | None = None,
        *,
        now: float,
        priority: int = 0,
    ) -> None:
        """A sequence ends: publish what `tokens` fill, release the other pages, unlock `node`.

        `tokens` may be shorter than the sequence, but not than the prefix that `node` holds.
        """
        kept = self.publish(tokens, pages, namespace, now=now, priority=priority)
        self.release(kept.pages[kept.length // self.page_size :])
        self.unlock(node)

    def reset(self) -> int:
        """Drop all that no lock holds. Returns the pages that became free at once."""
        dropped = self.tree.drop_unlocked()
        if not dropped:
            return 0
        pages = _pages_of(dropped)
        if self._record_events:
            cleared = not self.tree.num_nodes
            self._events.append(
                PagesCleared(self.tier) if cleared else PagesRemoved(pages, self.tier)
            )
        return self.pool.evict(pages)

    def counts(self) -> PageCounts:
        return self.pool.counts()

    def available(self) -> int:
        """Pages that `allocate` could give at most."""
        return self.pool.free_count + self.pool.evictable_count

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            queries=self._queries,
            hits=self._hits,
            evicted=self._evicted,
            nodes=self.tree.num_nodes,
            idle_before_eviction=self._idle_before_eviction,
        )

    def record(self, event: CacheEvent) -> None:
        """Tells of something that others did with what is cached here."""
        if self._record_events:
            self._events.append(event)

    def take_events(self) -> list[CacheEvent]:
        """What has changed since the last call, in order; empty unless `record_events`."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Events that tell an index that knows nothing what is cached now."""
        return [
            _stored(node, node.parent, self.tree.namespace(node), self.tier)
            for node in self.tree.nodes()
            if node.parent is not None
        ]

    def validate(self) -> None:
        """Check every invariant of pool and tree; O(pages + nodes). For tests and debugging."""
        self.pool.validate()
        self.tree.validate()
        protected: list[Pages] = [_NO_PAGES]
        evictable: list[Pages] = [_NO_PAGES]
        for node in self.tree.nodes():
            (protected if node.lock_ref else evictable).append(node.pages)
        for held, states in zip((protected, evictable), self.pool.tree_pages(), strict=True):
            assert np.array_equal(np.sort(np.concatenate(held)), states)

    def _evicting(self, victims: list[Node], parents: list[Node], now: float) -> None:
        """Leaves have left the tree, children before parents; their pages are not yet free."""

    def _protect(self, locked: list[Node]) -> None:
        if locked:
            self.pool.protect(_pages_of(locked))


def _stored(node: Node, parent: Node, namespace: str | None, tier: Tier) -> PagesStored:
    above = int(parent.pages[-1]) if parent.pages.size else None
    return PagesStored(namespace, above, node.tokens, node.pages, tier)


def _pages_of(nodes: list[Node]) -> Pages:
    """Their pages, one after another: a copy."""
    if len(nodes) == 1:
        return nodes[0].pages.copy()
    return np.concatenate([node.pages for node in nodes])
