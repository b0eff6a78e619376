"""Events of pages in, events of blocks out: numbered, and with a snapshot for who missed some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd_cluster.cache.block_hash import (
    BLOCK_TOKENS,
    chain_hashes,
    external_hash,
    namespace_hash,
)
from pd_cluster.cache.events import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    KvEvent,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    StorageHolds,
)
from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import Pages


@dataclass(frozen=True, slots=True)
class _Block:
    digest: bytes
    parent: int | None
    tokens: bytes  # int32
    namespace: str | None


class BlockLog:
    """The blocks of one cache, by the page that holds their last token.

    A block is stored when its last token is, which may complete a block that other nodes began;
    as a cache evicts from the ends of its prefixes, it is gone when that page is.

    Raises:
        ValueError: neither of `page_size` and `block_size` is a multiple of the other.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        block_size: int = BLOCK_TOKENS,
        medium: str = MEDIUM_DEVICE,
    ) -> None:
        if block_size < 1 or (block_size % page_size and page_size % block_size):
            raise ValueError(
                f"blocks of {block_size} tokens do not fit pages of {page_size}: one must be a"
                " multiple of the other"
            )
        self.page_size = page_size
        self.block_size = block_size
        self.medium = medium
        self._end = np.zeros(num_pages, np.int64)  # length of the prefix that a page ends
        self._above = np.full(num_pages, -1, np.int32)  # the page before it; -1: none
        self._tokens = np.zeros((num_pages, page_size), np.int32)
        self._ends_block = np.zeros(num_pages, np.bool_)
        # In order of storing, so parents come before what is chained to them.
        self._blocks: dict[int, list[_Block]] = {}
        # Pages of several blocks may agree in their first ones.
        self._count: dict[bytes, int] = {}

    def apply(self, event: CacheEvent) -> KvEvent | None:
        """What the event means in blocks; None where it completes or breaks none."""
        match event:
            case PagesStored():
                return self._store(event)
            case PagesRemoved(pages):
                return self._remove(pages)
            case PagesCleared():
                self._blocks.clear()
                self._count.clear()
                self._ends_block[:] = False
                return AllBlocksCleared()
            case StorageHolds():
                return None  # what storage holds is not published: it forgets without a word

    def snapshot(self) -> list[KvEvent]:
        """Events that store all blocks, one each, parents first."""
        distinct = {block.digest: block for each in self._blocks.values() for block in each}
        return [self._stored([block]) for block in distinct.values()]

    def _store(self, event: PagesStored) -> KvEvent | None:
        size, pages = self.page_size, event.pages
        last = -1 if event.parent is None else event.parent
        start = 0 if event.parent is None else int(self._end[last])
        self._above[pages[1:]] = pages[:-1]
        self._above[pages[0]] = last
        self._end[pages] = np.arange(start + size, start + event.tokens.size + 1, size)
        self._tokens[pages] = event.tokens.reshape(-1, size)
        # The block that is not complete above us begins in at most block_size / page_size pages.
        head: list[Tokens] = []
        for _ in range(start % self.block_size // size):
            head.append(self._tokens[last])
            last = int(self._above[last])
        tokens = np.concatenate([*reversed(head), event.tokens])
        above = self._blocks[last][-1].digest if last >= 0 else None
        digests = chain_hashes(
            tokens, self.block_size, namespace_hash(event.namespace) if above is None else above
        )
        if not digests:
            return None
        parent = None if above is None else external_hash(above)
        data, step, before = tokens.tobytes(), self.block_size * 4, tokens.size - event.tokens.size
        fresh: list[_Block] = []
        for i, digest in enumerate(digests):
            page = int(pages[((i + 1) * self.block_size - before - 1) // size])
            block = _Block(digest, parent, data[i * step : (i + 1) * step], event.namespace)
            self._blocks.setdefault(page, []).append(block)
            self._ends_block[page] = True
            if self._held(digest):
                fresh.append(block)
            parent = external_hash(digest)
        return self._stored(fresh) if fresh else None

    def _held(self, digest: bytes) -> bool:
        """One more page ends with this block; whether it is the first."""
        count = self._count.get(digest, 0)
        self._count[digest] = count + 1
        return not count

    def _dropped(self, digest: bytes) -> bool:
        """One page fewer ends with this block; whether it was the last."""
        count = self._count.pop(digest) - 1
        if count:
            self._count[digest] = count
        return not count

    def _stored(self, blocks: list[_Block]) -> BlockStored:
        """Blocks of one prefix, one after another."""
        namespace = blocks[0].namespace
        tokens = b"".join(block.tokens for block in blocks)
        return BlockStored(
            block_hashes=[external_hash(block.digest) for block in blocks],
            parent_block_hash=blocks[0].parent,
            token_ids=np.frombuffer(tokens, np.int32).tolist(),
            block_size=self.block_size,
            medium=self.medium,
            extra_keys=None if namespace is None else [(namespace,)] * len(blocks),
        )

    def _remove(self, pages: Pages) -> KvEvent | None:
        ends = pages[self._ends_block[pages]]
        self._ends_block[ends] = False
        gone = [block for page in ends.tolist() for block in self._blocks.pop(page)]
        names = [external_hash(block.digest) for block in gone if self._dropped(block.digest)]
        return BlockRemoved(names, self.medium) if names else None


class EventStream:
    """The events of one worker process, numbered from 0: of its caches, by medium."""

    def __init__(self, logs: Sequence[BlockLog]) -> None:
        self._logs = {log.medium: log for log in logs}
        self.next_seq = 0

    def apply(self, medium: str, events: Sequence[CacheEvent]) -> tuple[int, list[KvEvent]]:
        """What a cache's events mean in blocks, in order, and the number of the first."""
        first = self.next_seq
        out: list[KvEvent] = []
        for event in events:
            blocks = self._logs[medium].apply(event)
            if blocks is None:
                continue
            out.append(blocks)
            if isinstance(blocks, AllBlocksCleared):
                # That means all media: what others hold is said again.
                out += [block for log in self._logs.values() for block in log.snapshot()]
        self.next_seq += len(out)
        return first, out

    def snapshot(self) -> tuple[int, list[KvEvent]]:
        """The number of the next event, and events that tell all that is cached before it.

        The first of them clears what the receiver believed.
        """
        held = [event for log in self._logs.values() for event in log.snapshot()]
        return self.next_seq, [AllBlocksCleared(), *held]
