"""Which prefixes each worker of one role holds: a hint, as exact as the workers' events allow.

    events of a worker ──► its pages: prefix hash and depth of each ──► holders: hash → workers
                                                                            ▲
    a prompt's block hashes ────────────── match ───────────────────────────┘

Only prefixes of whole blocks (64 tokens, or a page where that is larger) stand in `holders`, once
however many workers hold them. A worker that holds a prefix holds every shorter one, so the walk
along a prompt narrows the set of holders down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_cluster.cache.events import CacheEvent, PagesCleared, PagesRemoved, PagesStored
from pd_cluster.coordinator.prefix_hash import prefix_hashes
from pd_cluster.types import WorkerId

# Lengths in tokens by a worker's slot: int64 [slots].
Lengths = NDArray[np.int64]

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KvUpdate:
    """Cache events of one life of a worker, in order; `first` numbers the first of them from 0.

    A snapshot's events tell all that is held now and replace what was known; its `first` is the
    number of the event that comes next.
    """

    worker: WorkerId
    first: int
    events: tuple[CacheEvent, ...]
    snapshot: bool = False


class HolderTable:
    """hash → the slots that hold it. Most prefixes have one holder, and take no set of bits.

    A value is `~slot` for a single holder, else a mask of bits.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: int, slot: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = ~slot
        elif holders >= 0:
            self._holders[key] = holders | 1 << slot
        elif holders != ~slot:
            self._holders[key] = 1 << ~holders | 1 << slot

    def discard(self, key: int, slot: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            return
        if holders < 0:
            if holders == ~slot:
                del self._holders[key]
            return
        left = holders & ~(1 << slot)
        if not left:
            del self._holders[key]
        elif left & left - 1:
            self._holders[key] = left
        else:
            self._holders[key] = ~(left.bit_length() - 1)

    def mask(self, key: int) -> int:
        """The holders as bits, 0 for none."""
        holders = self._holders.get(key, 0)
        return holders if holders >= 0 else 1 << ~holders


class ExpectedTable:
    """Prefixes that will be held once what was dispatched is done, counted by attempt."""

    def __init__(self) -> None:
        self.table = HolderTable()
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, keys: Sequence[int], slot: int) -> None:
        for key in keys:
            count = self._counts.get((key, slot), 0)
            self._counts[key, slot] = count + 1
            if not count:
                self.table.add(key, slot)

    def remove(self, keys: Sequence[int], slot: int) -> None:
        for key in keys:
            count = self._counts[key, slot] - 1
            if count:
                self._counts[key, slot] = count
            else:
                del self._counts[key, slot]
                self.table.discard(key, slot)


@dataclass(slots=True)
class _Holdings:
    """One worker's pages: the prefix that ends with each. Depth 0 stands for no prefix."""

    slot: int
    next: int = 0
    stale: bool = False
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    depths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def make_room(self, pages: int) -> None:
        if pages > len(self.depths):
            more = max(pages, 2 * len(self.depths)) - len(self.depths)
            self.hashes = np.concatenate([self.hashes, np.zeros(more, np.uint64)])
            self.depths = np.concatenate([self.depths, np.zeros(more, np.int64)])


class PrefixIndex:
    """Workers of one role by slot: small numbers, the caller's, reused when a worker goes."""

    def __init__(self, page_size: int, block: int = BLOCK_TOKENS) -> None:
        self.page_size = page_size
        self.block = max(block, page_size)
        if self.block % page_size:
            raise ValueError(f"blocks of {block} tokens are no whole number of {page_size}'s")
        self.holders = HolderTable()
        self.expected = ExpectedTable()
        self._holdings: dict[WorkerId, _Holdings] = {}

    def join(self, worker: WorkerId, slot: int) -> None:
        """A worker that holds nothing that we know of; its first event is number 0."""
        self._holdings[worker] = _Holdings(slot)

    def leave(self, worker: WorkerId) -> None:
        """Forgets at once all that the worker held."""
        holdings = self._holdings.pop(worker, None)
        if holdings is not None:
            self._clear(holdings)

    def stale(self, worker: WorkerId) -> bool:
        """Whether events were missed, so that nothing counts until a snapshot comes."""
        holdings = self._holdings.get(worker)
        return holdings is not None and holdings.stale

    def apply(self, update: KvUpdate) -> bool:
        """Takes events in; False if some are missing and the worker should send a snapshot.

        Events that were seen before are ignored, as are those of a life that is over.
        """
        holdings = self._holdings.get(update.worker)
        if holdings is None:
            return True
        if update.snapshot:
            self._clear(holdings)
            holdings.stale = False
            holdings.next = update.first
            return self._apply(holdings, update.events)
        if holdings.stale:
            return False
        if update.first > holdings.next:
            return self._lose(holdings)
        fresh = update.events[holdings.next - update.first :]
        holdings.next += len(fresh)
        return self._apply(holdings, fresh)

    def match(self, hashes: Sequence[int], slots: int, *, expected: bool = True) -> Lengths:
        """How many tokens of a prompt each slot below `slots` holds or is about to hold.

        `hashes` are the prompt's `block_hashes`; whole blocks count. Without `expected` only what
        is held now counts.
        """
        lengths = np.zeros(slots, np.int64)
        before = 0
        holding, coming = self.holders.mask, self.expected.table.mask
        alive = (1 << slots) - 1
        for number, key in enumerate(hashes):
            mask = (holding(key) | coming(key) if expected else holding(key)) & alive
            if number and mask != before:
                lengths[_bits(before & ~mask, slots)] = number * self.block
            if not mask:
                return lengths
            before = alive = mask
        if before:
            lengths[_bits(before, slots)] = len(hashes) * self.block
        return lengths

    def validate(self) -> None:
        """The table holds what the workers' pages say, no more and no less; O(pages)."""
        expected = HolderTable()
        for holdings in self._holdings.values():
            for key in self._keys(holdings, np.arange(len(holdings.depths))):
                expected.add(key, holdings.slot)
        assert expected._holders == self.holders._holders

    # --- within ---

    def _apply(self, holdings: _Holdings, events: Sequence[CacheEvent]) -> bool:
        for event in events:
            match event:
                case PagesStored():
                    if not self._store(holdings, event):
                        return self._lose(holdings)
                case PagesRemoved():
                    self._remove(holdings, event.pages)
                case PagesCleared():
                    self._clear(holdings)
        return True

    def _store(self, holdings: _Holdings, event: PagesStored) -> bool:
        pages = event.pages
        depth, parent = 0, None
        if event.parent is not None:
            if event.parent >= len(holdings.depths) or not holdings.depths[event.parent]:
                return False
            depth = int(holdings.depths[event.parent])
            parent = int(holdings.hashes[event.parent])
        hashes = prefix_hashes(event.tokens, event.namespace, start=depth, parent=parent)
        holdings.make_room(int(pages.max()) + 1)
        ends = np.arange(1, len(pages) + 1) * self.page_size
        holdings.hashes[pages] = hashes[ends - 1]
        holdings.depths[pages] = depth + ends
        for key in self._keys(holdings, pages):
            self.holders.add(key, holdings.slot)
        return True

    def _remove(self, holdings: _Holdings, pages: NDArray[np.integer]) -> None:
        known = pages[pages < len(holdings.depths)]
        for key in self._keys(holdings, known):
            self.holders.discard(key, holdings.slot)
        holdings.depths[known] = 0

    def _clear(self, holdings: _Holdings) -> None:
        self._remove(holdings, np.arange(len(holdings.depths)))

    def _lose(self, holdings: _Holdings) -> bool:
        self._clear(holdings)
        holdings.stale = True
        return False

    def _keys(self, holdings: _Holdings, pages: NDArray[np.integer]) -> list[int]:
        """Hashes of those of the pages that end a block."""
        depths = holdings.depths[pages]
        keys: list[int] = holdings.hashes[pages[(depths > 0) & (depths % self.block == 0)]].tolist()
        return keys


def _bits(mask: int, slots: int) -> NDArray[np.bool_]:
    data = np.frombuffer(mask.to_bytes(-(-slots // 8), "little"), np.uint8)
    return np.unpackbits(data, count=slots, bitorder="little").view(np.bool_)
