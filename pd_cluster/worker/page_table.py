"""The pages of one sequence: those that it shares with the tree, and its own.

    pages   [ the tree's, locked │ private │ room to grow ]
            0                published  num_pages

One lock on `node`, the deepest node of the shared part, protects all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from pd_cluster.cache.node import Node
from pd_cluster.cache.page_pool import OutOfPages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.types import IntArray


class PageTable:
    """Page ids by position, growable, and the lock that goes with them."""

    __slots__ = ("_pages", "cache", "node", "num_pages", "published")

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.node: Node | None = None
        self.published = 0
        self.num_pages = 0
        self._pages: IntArray = np.empty(0, np.int32)

    @property
    def pages(self) -> IntArray:
        return self._pages[: self.num_pages]

    @property
    def is_open(self) -> bool:
        return self.node is not None

    def claim(
        self,
        tokens: IntArray,
        namespace: str | None,
        *,
        now: float,
        compute_last: bool,
        compute_all: bool = False,
        spare: int = 0,
    ) -> tuple[int, list[tuple[int, int]]]:
        """Locks the cached prefix of `tokens` and allocates pages for the rest.

        With `compute_last` the last token counts as not cached: where its page is published, it
        gets a private copy, so that no published page is written again. With `compute_all` nothing
        counts as cached, and nobody is told that it was looked up. `spare` pages must be left
        available. Returns how many tokens need not be computed, and the (source, target) pages to
        copy. Raises OutOfPages, with nothing changed.
        """
        size, cache = self.cache.page_size, self.cache
        looked_up = tokens[:0] if compute_all else tokens
        match = cache.match(looked_up, namespace, now=now, count_hit=False)
        again = compute_last and match.length == len(tokens)
        total = -(-len(tokens) // size)
        needed = 1 if again else total - len(match.pages)
        cache.lock(match.node)
        try:
            if spare and needed + spare > cache.available():
                raise OutOfPages(needed + spare, cache.available())
            fresh = cache.allocate(needed, now=now)
        except OutOfPages:
            cache.unlock(match.node)
            raise
        cache.match(looked_up, namespace, now=now, count_hit=True)
        self.node = match.node
        if not again:
            self._set(np.concatenate([match.pages, fresh]))
            self.published = len(match.pages)
            return match.length, []
        self._set(np.concatenate([match.pages[:-1], fresh]))
        self.published = total - 1
        copies = [(int(match.pages[-1]), int(fresh[0]))] if size > 1 else []
        return len(tokens) - 1, copies

    def grow(self, pages: IntArray) -> None:
        """Appends private pages."""
        needed = self.num_pages + len(pages)
        if needed > len(self._pages):
            bigger = np.empty(max(needed, 2 * len(self._pages)), np.int32)
            bigger[: self.num_pages] = self.pages
            self._pages = bigger
        self._pages[self.num_pages : needed] = pages
        self.num_pages = needed

    def publish(
        self, tokens: IntArray, namespace: str | None, *, now: float, priority: int
    ) -> None:
        """Puts the full pages of `tokens` into the tree; their KV must be in memory."""
        full = len(tokens) // self.cache.page_size
        if full <= self.published:
            return
        assert self.node is not None
        kept = self.cache.publish(
            tokens[: full * self.cache.page_size],
            self.pages[:full],
            namespace,
            now=now,
            priority=priority,
        )
        self.pages[:full] = kept.pages
        self.published = kept.length // self.cache.page_size
        self.cache.move_lock(self.node, kept.node)
        self.node = kept.node

    def close(self) -> None:
        """Releases the private pages and the lock; what was published stays in the tree."""
        if self.node is None:
            return
        self.cache.release(self.pages[self.published :])
        self.cache.unlock(self.node)
        self.node = None
        self.num_pages = self.published = 0

    def _set(self, pages: IntArray) -> None:
        self._pages, self.num_pages = pages, len(pages)


def freed_by(tables: Iterable[PageTable]) -> int:
    """Pages that could be allocated again if all of these were closed: those that nobody shares."""
    pages = 0
    locks: Counter[Node] = Counter()
    for table in tables:
        pages += table.num_pages - table.published
        node = table.node
        while node is not None and node.parent is not None:
            locks[node] += 1
            node = node.parent
    return pages + sum(len(node.pages) for node, count in locks.items() if count == node.lock_ref)


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Length of the longest common prefix of two token arrays."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
