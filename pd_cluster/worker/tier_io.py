"""Carries out what a cache with tiers asks for: copies between memories, and storage.

A thread copies between device and host, one reads storage and one writes it, so none of them waits
for another, nor does the step that is computed meanwhile. Ends are reported from these threads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import numpy as np
import torch

from pd_cluster.cache.block_hash import chain_hashes
from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.cache.node import Tokens
from pd_cluster.cache.storage import StorageBackend, StorageError, storage_root
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

logger = logging.getLogger(__name__)

# Blocks that are read from storage between two reports.
FETCH_BATCH = 8
# A store that failed is left alone for that long: requests must not wait for it one after another.
REST_S = 10.0

_Queue: TypeAlias = "queue.SimpleQueue[TierOp]"


def make_host_memory(device: Layout, num_pages: int) -> Layout:
    """Page-first memory of the CPU for pages of `device`: pinned where that is a GPU's."""
    host = _beside(device, num_pages)
    if device.device.type == "cuda":
        address, num_bytes, _ = host.region()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(error):
            logger.warning("host memory for KV is not pinned: error %s", error)
    return host


class TierIO:
    """`report` is called from other threads.

    `block` (tokens) is the unit of `storage`; `signature` says what the KV depends on beside the
    tokens.
    """

    def __init__(
        self,
        device: Layout,
        host: Layout,
        report: Callable[[TierEvent], None],
        *,
        storage: StorageBackend | None = None,
        signature: Mapping[str, str] | None = None,
        block: int = 64,
    ) -> None:
        self.device = device
        self.host = host
        self.storage = storage
        self.signature = {} if signature is None else dict(signature)
        self.block = block
        self._report = report
        self._stopped: set[int] = set()
        self._rests_until = 0.0
        self._copies: _Queue = queue.SimpleQueue()
        self._reads: _Queue = queue.SimpleQueue()
        self._writes: _Queue = queue.SimpleQueue()
        self._start("tier-copies", self._copies)
        if storage is not None:
            self._start("tier-reads", self._reads)
            self._start("tier-writes", self._writes)

    def submit(self, op: TierOp) -> None:
        """Carries `op` out: before returning if it says so, else as soon as may be."""
        match op:
            case CopyOut(now=True):
                self._carry_out(op)
            case CopyOut() | CopyIn():
                self._copies.put(op)
            case StoreBlocks():
                self._writes.put(op)
            case StopFetch():
                self._stopped.add(op.op)
            case _:
                self._reads.put(op)

    def _start(self, name: str, ops: _Queue) -> None:
        # One operation after another: a device stream of its own keeps it beside the computing.
        def run() -> None:
            with self._stream():
                while True:
                    self._carry_out(ops.get())

        threading.Thread(target=run, name=name, daemon=True).start()

    def _stream(self) -> AbstractContextManager[object]:
        if self.device.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self.device.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)

    def _carry_out(self, op: TierOp) -> None:
        started = time.perf_counter()
        tokens, error = 0, ""
        try:
            match op:
                case CopyOut():
                    self.host.copy_from(self.device, op.device, op.host)
                    self._synchronize()
                case CopyIn():
                    self.device.copy_from(self.host, op.host, op.device)
                    self._synchronize()
                case ProbeBlocks():
                    keys = self._keys(op.tokens, op.namespace, op.start)
                    tokens = self._storage().exists(keys) * self.block
                case FetchBlocks():
                    tokens = self._fetch(op)
                case StoreBlocks():
                    self._store(op)
        except StorageError as failure:
            error = str(failure)
            if time.monotonic() >= self._rests_until:
                logger.warning("KV storage: %s", error)
                self._rests_until = time.monotonic() + REST_S
        seconds = time.perf_counter() - started
        self._report(TierEvent(op.op, tokens, seconds=seconds, error=error))

    def _storage(self) -> StorageBackend:
        if time.monotonic() < self._rests_until:
            raise StorageError("it failed a moment ago")
        assert self.storage is not None
        return self.storage

    def _fetch(self, op: FetchBlocks) -> int:
        keys = self._keys(op.tokens, op.namespace, op.start)
        per_block = self.block // self.host.page_size
        staging = _beside(self.host, per_block * min(FETCH_BATCH, len(keys)))
        found = 0
        while found < len(keys) and op.op not in self._stopped:
            batch = keys[found : found + FETCH_BATCH]
            got = self._storage().get(batch, _blocks(staging, per_block)[: len(batch)])
            pages = op.host[found * per_block : (found + got) * per_block]
            self.host.copy_from(staging, np.arange(pages.size, dtype=np.int32), pages)
            found += got
            if got < len(batch):
                break
            if found < len(keys):
                self._report(TierEvent(op.op, found * self.block, done=False))
        # Operations are numbered in order: what is older than this one is over.
        self._stopped = {each for each in self._stopped if each > op.op}
        return found * self.block

    def _store(self, op: StoreBlocks) -> None:
        per_block = self.block // self.host.page_size
        staging = _beside(self.host, per_block)
        pages = np.arange(per_block, dtype=np.int32)
        storage = self._storage()
        for number, key in enumerate(self._keys(op.tokens, op.namespace, op.start)):
            if storage.exists([key]):
                continue
            source = op.host[number * per_block : (number + 1) * per_block]
            staging.copy_from(self.host, source, pages)
            storage.put([key], _blocks(staging, per_block))

    def _keys(self, tokens: Tokens, namespace: str | None, start: int) -> list[bytes]:
        root = storage_root(self.signature, self.block, namespace)
        return chain_hashes(tokens, self.block, root)[start // self.block :]

    def _synchronize(self) -> None:
        if self.device.device.type == "cuda":
            torch.cuda.current_stream(self.device.device).synchronize()


def _beside(layout: Layout, num_pages: int) -> Layout:
    """Page-first memory of the CPU for so many pages of the same shape."""
    return make_layout(
        "page_first",
        num_pages,
        layout.num_layers,
        layout.page_size,
        layout.num_kv_heads,
        layout.head_dim,
        layout.dtype,
        "cpu",
    )


def _blocks(staging: Layout, per_block: int) -> list[memoryview]:
    """The bytes of each block of `per_block` pages."""
    whole = staging.buffer.view(torch.uint8).reshape(-1).numpy().data
    step = per_block * staging.page_bytes
    return [whole[at : at + step] for at in range(0, whole.nbytes, step)]
