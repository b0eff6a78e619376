"""Pure workers whose caches have tiers, in a world where copies end when they like."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from pd_cluster.cache.block_hash import chain_hashes, namespace_hash
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
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
from pd_cluster.worker.instructions import Instruction
from pd_cluster.worker.scheduler import WorkerScheduler
from tests.worker.harness import EOS, FakeWorker, World

BLOCK = 16
Storage = dict[bytes, np.ndarray]


class TieredWorker(FakeWorker):
    """A worker with host memory, and storage that outlives it."""

    def __init__(
        self, name: str, num_pages: int, page_size: int, storage: Storage, **options: Any
    ) -> None:
        super().__init__(name, num_pages, page_size, options.pop("chunk", 32))
        policy = make_eviction_policy("lru", {})
        host = PrefixCache(
            PagePool(options.pop("host_pages")), page_size, policy, record_events=True, tier="host"
        )
        keep_answers = options.pop("keep_answers", True)
        self.cache = TieredCache(
            PagePool(num_pages),
            page_size,
            make_eviction_policy("lru", {}),
            host=host,
            record_events=True,
            storage_block=BLOCK,
            **options,
        )
        old = self.scheduler
        self.scheduler = WorkerScheduler(
            self.cache,
            worker=self.id,
            agent=name.encode(),
            region=(0, 0, 0),
            eos_token_ids=[EOS],
            max_running=1000,
            chunk_tokens=old.chunk_tokens,
            local_tokens=old.local_tokens,
            keep_answers=keep_answers,
            prefill_s=1e6,
            transfer_s=1e6,
            drain_s=1e6,
        )
        self.host_memory = np.zeros((host.pool.num_pages, page_size), np.int64)
        self.storage = storage
        self.ops: deque[TierOp] = deque()

    def take_ops(self) -> None:
        for op in self.scheduler.take_tier_ops():
            if isinstance(op, CopyOut) and op.now:
                self.mailbox.append(self.carry_out(op))
            elif not isinstance(op, StopFetch):  # may be too late: here it always is
                self.ops.append(op)

    def carry_out(self, op: TierOp) -> TierEvent:
        tokens = 0
        match op:
            case CopyOut():
                self.host_memory[op.host] = self.memory[op.device]
            case CopyIn():
                self.memory[op.device] = self.host_memory[op.host]
            case ProbeBlocks():
                for key in self.keys(op):
                    if key not in self.storage:
                        break
                    tokens += BLOCK
            case FetchBlocks():
                size = BLOCK // self.page_size
                for number, key in enumerate(self.keys(op)):
                    if key not in self.storage:
                        break
                    self.host_memory[op.host[number * size :][:size]] = self.storage[key]
                    tokens += BLOCK
            case StoreBlocks():
                size = BLOCK // self.page_size
                for number, key in enumerate(self.keys(op)):
                    pages = op.host[number * size :][:size]
                    self.storage[key] = self.host_memory[pages].copy()
        return TierEvent(op.op, tokens, seconds=1e-6)

    def keys(self, op: ProbeBlocks | FetchBlocks | StoreBlocks) -> list[bytes]:
        keys = chain_hashes(op.tokens, BLOCK, namespace_hash(op.namespace))
        return keys[op.start // BLOCK :]


class TieredWorld(World):
    """Copies end in their order, at any time."""

    def possible(self) -> list[tuple[str, object]]:
        return super().possible() + [("copy", w) for w in self.tiered if w.ops]

    @property
    def tiered(self) -> list[TieredWorker]:
        return [worker for worker in self.workers if isinstance(worker, TieredWorker)]

    def _do(self, kind: str, subject: object) -> bool:
        if kind != "copy":
            return super()._do(kind, subject)
        assert isinstance(subject, TieredWorker)
        subject.mailbox.append(subject.carry_out(subject.ops.popleft()))
        return True

    def _begin(self, worker: FakeWorker) -> bool:
        assert isinstance(worker, TieredWorker)
        before = len(worker.ops)
        self._obey(worker, worker.scheduler.tick(self.now))
        return super()._begin(worker) or len(worker.ops) > before

    def _obey(self, worker: FakeWorker, instructions: list[Instruction]) -> None:
        assert isinstance(worker, TieredWorker)
        worker.take_ops()
        super()._obey(worker, instructions)
