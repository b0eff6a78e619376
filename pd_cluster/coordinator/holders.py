"""Who holds what, by the hash of a prefix: the tables that the prefix index is made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

# Blocks that are remembered of one store: 64 million tokens, in some 150 MB.
MAX_STORED = 1_000_000


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


class Stores:
    """What storage below the host tiers holds, by the name of the store and block.

    Wrong where a store has removed a block: then one prompt is computed that was thought to be
    read, and stored again.
    """

    def __init__(self, limit: int = MAX_STORED) -> None:
        self._limit = limit
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def add(self, store: str, keys: Iterable[int]) -> None:
        blocks = self._blocks.setdefault(store, OrderedDict())
        for key in keys:
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._limit:
            blocks.popitem(last=False)

    def runs(self, store: str, hashes: Sequence[int]) -> NDArray[np.int64] | None:
        """To which block the store holds a prompt without a gap, by the block that a reader begins
        with, int64 [blocks + 1]; None where it holds nothing of it.
        """
        blocks = self._blocks.get(store)
        if not blocks:
            return None
        held = np.array([key in blocks for key in hashes], np.bool_)
        if not held.any():
            return None
        ends = np.arange(len(hashes) + 1)
        for number in range(len(hashes) - 1, -1, -1):
            if held[number]:
                ends[number] = ends[number + 1]
        return ends
