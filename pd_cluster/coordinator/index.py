"""Which prefixes each worker of one role holds: a hint, as exact as the workers' events allow.

    events of a worker ──► its pages: prefix hash and depth of each ──► holders: hash → workers
                                                                            ▲
    a prompt's block hashes ────────────── match ───────────────────────────┘

Only prefixes of whole blocks (64 tokens, or a page where that is larger) stand in `holders`, once
however many workers hold them. A worker that holds a prefix holds every shorter one, so the walk
along a prompt narrows the set of holders down.

Host memory below the pool has a table of its own, alike. Storage has one for each store, of what
its workers said that they wrote there or read: a store is shared, outlives its workers and forgets
without a word, so its entries belong to nobody, and the oldest of too many go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_cluster.cache.events import (
    CacheEvent,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    StorageHolds,
    Tier,
)
from pd_cluster.coordinator.holders import ExpectedTable, HolderTable, Stores
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


@dataclass(slots=True)
class _Pages:
    """One tier's pages: the prefix that ends with each. Depth 0 stands for no prefix."""

    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    depths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def make_room(self, pages: int) -> None:
        if pages > len(self.depths):
            more = max(pages, 2 * len(self.depths)) - len(self.depths)
            self.hashes = np.concatenate([self.hashes, np.zeros(more, np.uint64)])
            self.depths = np.concatenate([self.depths, np.zeros(more, np.int64)])


@dataclass(slots=True)
class _Holdings:
    """What one life of a worker holds; the next event has number `next`."""

    slot: int
    store: str
    next: int = 0
    stale: bool = False
    tiers: dict[Tier, _Pages] = field(default_factory=dict)


class PrefixIndex:
    """Workers of one role by slot: small numbers, the caller's, reused when a worker goes.

    `holders` and `hosts` are what they hold in their pools and in the host memory below;
    `stores` may be shared with the index of the other role.
    """

    def __init__(
        self, page_size: int, block: int = BLOCK_TOKENS, stores: Stores | None = None
    ) -> None:
        self.page_size = page_size
        self.block = max(block, page_size)
        if self.block % page_size:
            raise ValueError(f"blocks of {block} tokens are no whole number of {page_size}'s")
        self.holders = HolderTable()
        self.hosts = HolderTable()
        self.stores = Stores() if stores is None else stores
        self.expected = ExpectedTable()
        self._tables: dict[Tier, HolderTable] = {"device": self.holders, "host": self.hosts}
        self._holdings: dict[WorkerId, _Holdings] = {}
        # The slots above each store.
        self._above: dict[str, list[int]] = {}

    def join(self, worker: WorkerId, slot: int, store: str = "") -> None:
        """A worker that holds nothing that we know of; its first event is number 0.

        `store` is below its host tier; "" for none.
        """
        self._holdings[worker] = _Holdings(slot, store)
        if store:
            self._above.setdefault(store, []).append(slot)

    def leave(self, worker: WorkerId) -> None:
        """Forgets at once all that the worker held, on every tier of its own."""
        holdings = self._holdings.pop(worker, None)
        if holdings is None:
            return
        self._clear(holdings)
        if holdings.store:
            self._above[holdings.store].remove(holdings.slot)

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
            if update.first < holdings.next and not holdings.stale:
                return True  # an old one, that comes again
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
        """How many tokens of a prompt each slot below `slots` holds or is about to hold in its
        pool.

        `hashes` are the prompt's `block_hashes`; whole blocks count. Without `expected` only what
        is held now counts.
        """
        return self._walk(
            hashes, slots, self.holders.mask, self.expected.table.mask if expected else None
        )

    def match_below(self, hashes: Sequence[int], held: Lengths) -> tuple[Lengths, Lengths] | None:
        """How far each slot comes with what lies in its host memory, and then in its store, beyond
        the `held` tokens of its pool: two lengths, at least `held`. None where nothing lies there.
        """
        if not len(self.hosts) and not any(self._above.values()):
            return None
        host = np.maximum(held, self._walk(hashes, len(held), self.hosts.mask))
        stored = host
        for store, slots in self._above.items():
            runs = self.stores.runs(store, hashes) if slots else None
            if runs is None:
                continue
            first = host[slots] // self.block
            stored = stored.copy() if stored is host else stored
            stored[slots] = np.maximum(host[slots], runs[first] * self.block)
        return host, stored

    def _walk(
        self,
        hashes: Sequence[int],
        slots: int,
        holding: Callable[[int], int],
        coming: Callable[[int], int] | None = None,
    ) -> Lengths:
        lengths = np.zeros(slots, np.int64)
        before = 0
        alive = (1 << slots) - 1
        for number, key in enumerate(hashes):
            mask = (holding(key) | coming(key) if coming else holding(key)) & alive
            if number and mask != before:
                lengths[_bits(before & ~mask, slots)] = number * self.block
            if not mask:
                return lengths
            before = alive = mask
        if before:
            lengths[_bits(before, slots)] = len(hashes) * self.block
        return lengths

    def validate(self) -> None:
        """The tables hold what the workers' pages say, no more and no less; O(pages)."""
        for tier, table in self._tables.items():
            expected = HolderTable()
            for holdings in self._holdings.values():
                if pages := holdings.tiers.get(tier):
                    for key in self._keys(pages, np.arange(len(pages.depths))):
                        expected.add(key, holdings.slot)
            assert expected._holders == table._holders
        above = sorted((h.store, h.slot) for h in self._holdings.values() if h.store)
        assert above == sorted((name, slot) for name, of in self._above.items() for slot in of)

    # --- within ---

    def _apply(self, holdings: _Holdings, events: Sequence[CacheEvent]) -> bool:
        for event in events:
            match event:
                case PagesStored():
                    if not self._store(holdings, event):
                        return self._lose(holdings)
                case PagesRemoved():
                    self._remove(holdings, event.tier, event.pages)
                case PagesCleared():
                    self._clear(holdings, (event.tier,))
                case StorageHolds():
                    self._keep(holdings, event)
        return True

    def _store(self, holdings: _Holdings, event: PagesStored) -> bool:
        pages, tier = event.pages, holdings.tiers.setdefault(event.tier, _Pages())
        depth, parent = 0, None
        if event.parent is not None:
            if event.parent >= len(tier.depths) or not tier.depths[event.parent]:
                return False
            depth = int(tier.depths[event.parent])
            parent = int(tier.hashes[event.parent])
        hashes = prefix_hashes(event.tokens, event.namespace, start=depth, parent=parent)
        tier.make_room(int(pages.max()) + 1)
        ends = np.arange(1, len(pages) + 1) * self.page_size
        tier.hashes[pages] = hashes[ends - 1]
        tier.depths[pages] = depth + ends
        table = self._tables[event.tier]
        for key in self._keys(tier, pages):
            table.add(key, holdings.slot)
        return True

    def _keep(self, holdings: _Holdings, event: StorageHolds) -> None:
        """The store holds what ends with these host pages, those of them that are still cached."""
        host = holdings.tiers.get("host")
        if host is not None and holdings.store:
            known = event.pages[event.pages < len(host.depths)]
            self.stores.add(holdings.store, self._keys(host, known))

    def _remove(self, holdings: _Holdings, tier: Tier, pages: NDArray[np.integer]) -> None:
        held = holdings.tiers.get(tier)
        if held is None:
            return
        known, table = pages[pages < len(held.depths)], self._tables[tier]
        for key in self._keys(held, known):
            table.discard(key, holdings.slot)
        held.depths[known] = 0

    def _clear(self, holdings: _Holdings, tiers: Iterable[Tier] = ("device", "host")) -> None:
        for tier in tiers:
            if pages := holdings.tiers.get(tier):
                self._remove(holdings, tier, np.arange(len(pages.depths)))

    def _lose(self, holdings: _Holdings) -> bool:
        self._clear(holdings)
        holdings.stale = True
        return False

    def _keys(self, held: _Pages, pages: NDArray[np.integer]) -> list[int]:
        """Hashes of those of the pages that end a block."""
        depths = held.depths[pages]
        keys: list[int] = held.hashes[pages[(depths > 0) & (depths % self.block == 0)]].tolist()
        return keys


def _bits(mask: int, slots: int) -> NDArray[np.bool_]:
    data = np.frombuffer(mask.to_bytes(-(-slots // 8), "little"), np.uint8)
    return np.unpackbits(data, count=slots, bitorder="little").view(np.bool_)
