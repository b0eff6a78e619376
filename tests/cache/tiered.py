"""A cache with tiers, and memories that know which prefix each page of each tier should hold."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import PagePool, Pages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_books import Promotion
from pd_cluster.cache.tier_ops import (
    CopyIn,
    CopyOut,
    FetchBlocks,
    ProbeBlocks,
    StopFetch,
    StoreBlocks,
    TierEvent,
    TierOp,
)
from pd_cluster.cache.tiers import TieredCache

Prefix: TypeAlias = tuple[str | None, tuple[int, ...]]


def prefixes(tokens: Tokens, namespace: str | None, page_size: int) -> list[Prefix]:
    values = tuple(tokens.tolist())
    return [(namespace, values[:end]) for end in range(page_size, len(values) + 1, page_size)]


class Tiers:
    """Carries operations out one at a time, when told to; what is urgent at once."""

    def __init__(
        self,
        *,
        device: int = 16,
        host: int = 32,
        page_size: int = 1,
        policy: str = "lru",
        storage: dict[Prefix, list[Any]] | None = None,
        block: int = 4,
        **options: Any,
    ) -> None:
        self.page_size = page_size
        self.block = block
        self.cache = TieredCache(
            PagePool(device),
            page_size,
            make_eviction_policy(policy, {}),
            host=PrefixCache(
                PagePool(host),
                page_size,
                make_eviction_policy(policy, {}),
                record_events=options.get("record_events", False),
                tier="host",
            ),
            storage_block=None if storage is None else block,
            **options,
        )
        self.device_memory: list[Any] = [None] * device
        self.host_memory: list[Any] = [None] * host
        self.storage = {} if storage is None else storage
        self.copying: deque[TierOp] = deque()
        self.storing: deque[TierOp] = deque()
        self.stopped: set[int] = set()
        self.done: list[TierOp] = []
        self.now = 0.0

    # -- what a worker does

    def promote(self, tokens: Tokens, namespace: str | None = None) -> Promotion | None:
        promotion = self.cache.promote(tokens, namespace, now=self.now)
        self.take()
        return promotion

    def ready(self, promotion: Promotion) -> bool:
        answer = self.cache.ready(promotion, self.now)
        self.take()
        return answer

    def claim(self, tokens: Tokens, namespace: str | None = None) -> tuple[int, Node, Pages]:
        """Match, lock, allocate and compute; raises OutOfPages with nothing changed."""
        self.now += 1.0
        match = self.cache.match(tokens, namespace, now=self.now, count_hit=False)
        self.cache.lock(match.node)
        total = -(-tokens.size // self.page_size)
        try:
            own = self.cache.allocate(total - match.pages.size, self.now)
        except Exception:
            self.cache.unlock(match.node)
            raise
        finally:
            self.take()
        self.cache.match(tokens, namespace, now=self.now, count_hit=True)
        table = np.concatenate([match.pages, own])
        all_prefixes = prefixes(tokens, namespace, self.page_size)
        for prefix, page in zip(all_prefixes[match.pages.size :], own.tolist(), strict=False):
            self.device_memory[page] = prefix
        for page in own.tolist()[len(all_prefixes) - match.pages.size :]:
            self.device_memory[page] = "a page that is not full"
        self.take()
        return match.length, match.node, table

    def finish(
        self, tokens: Tokens, node: Node, table: Pages, namespace: str | None = None
    ) -> None:
        self.cache.finish(tokens, table, node, namespace, now=self.now)
        self.take()

    def run(self, tokens: Tokens, namespace: str | None = None) -> tuple[int, int, int]:
        """A whole request, all that it waits for done at once: (device, host, storage) hits."""
        promotion = self.promote(tokens, namespace)
        while promotion is not None and not self.ready(promotion):
            assert self.step(), "waits for nothing"
        try:
            cached, node, table = self.claim(tokens, namespace)
        finally:
            if promotion is not None:
                self.cache.settle(promotion)
                self.take()
        self.finish(tokens, node, table, namespace)
        if promotion is None:
            return cached, 0, 0
        below = promotion.host_tokens + promotion.storage_tokens
        return cached - below, promotion.host_tokens, promotion.storage_tokens

    # -- what the machinery does

    def take(self) -> None:
        for op in self.cache.take_ops():
            match op:
                case CopyOut(now=True):
                    self.carry_out(op)
                case CopyOut() | CopyIn():
                    self.copying.append(op)
                case StopFetch():
                    self.stopped.add(op.op)
                case _:
                    self.storing.append(op)

    def step(self, storage_first: bool = False, error: str = "") -> bool:
        """Carries out one operation that waits; False if none does."""
        queues = [self.copying, self.storing]
        for queue in reversed(queues) if storage_first else queues:
            if queue:
                self.carry_out(queue.popleft(), error)
                return True
        return False

    def drain(self) -> None:
        while self.step():
            pass

    def carry_out(self, op: TierOp, error: str = "") -> None:
        tokens = 0
        self.done.append(op)
        match op:
            case CopyOut() if not error:
                for source, target in zip(op.device.tolist(), op.host.tolist(), strict=True):
                    self.host_memory[target] = self.device_memory[source]
            case CopyIn() if not error:
                for source, target in zip(op.host.tolist(), op.device.tolist(), strict=True):
                    self.device_memory[target] = self.host_memory[source]
            case ProbeBlocks() if not error:
                tokens = self._found(op.tokens, op.namespace, op.start)
            case FetchBlocks() if not error:
                tokens = min(
                    self._found(op.tokens, op.namespace, op.start), op.tokens.size - op.start
                )
                if op.op in self.stopped:
                    tokens = min(tokens, self.block)
                for at in range(op.start, op.start + tokens, self.block):
                    stored = self.storage[
                        op.namespace, tuple(op.tokens[: at + self.block].tolist())
                    ]
                    first = (at - op.start) // self.page_size
                    for i, content in enumerate(stored):
                        self.host_memory[int(op.host[first + i])] = content
                    if at + self.block < op.start + tokens:
                        part = TierEvent(op.op, at + self.block - op.start, done=False)
                        self.cache.tier_event(part, self.now)
            case StoreBlocks() if not error:
                per_block = self.block // self.page_size
                for number, at in enumerate(range(op.start, op.tokens.size, self.block)):
                    key = (op.namespace, tuple(op.tokens[: at + self.block].tolist()))
                    pages = op.host[number * per_block : (number + 1) * per_block].tolist()
                    self.storage[key] = [self.host_memory[page] for page in pages]
        self.cache.tier_event(TierEvent(op.op, tokens, seconds=1.0, error=error), self.now)
        self.take()

    def _found(self, tokens: Tokens, namespace: str | None, start: int) -> int:
        end = start
        while end + self.block <= tokens.size:
            if (namespace, tuple(tokens[: end + self.block].tolist())) not in self.storage:
                break
            end += self.block
        return end - start

    # -- what must hold

    def validate(self) -> None:
        """Every page of every tree, and every stored block, holds what its place says."""
        self.cache.validate()
        for cache, memory in (
            (self.cache, self.device_memory),
            (self.cache.host, self.host_memory),
        ):
            for node in cache.tree.nodes():
                if node.children:
                    continue
                path = [node]
                while path[-1].parent is not cache.tree.root:
                    assert path[-1].parent is not None
                    path.append(path[-1].parent)
                tokens = np.concatenate([each.tokens for each in reversed(path)])
                pages = np.concatenate([each.pages for each in reversed(path)])
                wanted = prefixes(tokens, cache.tree.namespace(node), self.page_size)
                assert [memory[page] for page in pages.tolist()] == wanted
        for (namespace, values), stored in self.storage.items():
            wanted = prefixes(np.array(values, np.int32), namespace, self.page_size)
            assert stored == wanted[-self.block // self.page_size :]

    def at_rest(self) -> None:
        """Once all is done nothing is held on any tier."""
        self.drain()
        self.validate()
        assert self.cache.idle
        counts = self.cache.counts()
        assert counts.private == counts.in_flight == counts.protected == 0
