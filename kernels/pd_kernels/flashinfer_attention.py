"""Attention over pages and page append by flashinfer: in half precision, for heads of some sizes.

Its kernels take keys and values as views [num_pages, page_size, Hk, D] with any strides but in the
last dimension (the same for both), so pools of either layout are handed to it as they are. Whatever
else it does not take goes to Triton's kernels, decided when a step is planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pd_kernels import flashinfer_kernels
from pd_kernels.planned_attention import (
    AttentionByOps,
    AttentionHeads,
    CapturedAttention,
    PagedAttention,
    PageTables,
    StepAttention,
)

_LOG = logging.getLogger(__name__)

_DIMS = (64, 128, 256)
# From this many query heads per KV head on, matrix units are quicker; and above, the other kernels
# are not compiled for every number.
_TENSOR_CORE_GROUP = 4
# Threads of one block, each of which appends 16 bytes of a token's keys.
_MOST_THREADS = 1024
_VECTOR_BYTES = 16
_MOST_STRIDE = 1 << 32  # its page structure counts elements in 32 bits
_LEAST_WORKSPACE = 128 << 20  # as flashinfer recommends


def load() -> Callable[[AttentionHeads], PagedAttention]:
    """Raises `BackendUnavailable` where flashinfer does not run."""
    flashinfer = flashinfer_kernels.working()

    def attention(heads: AttentionHeads) -> PagedAttention:
        if not _takes(heads):
            return AttentionByOps(heads)
        try:
            planned = FlashinferAttention(flashinfer, heads)
            _try(planned, heads)
        except Exception as error:  # of its compiler, of CUDA, of a version that differs
            _LOG.warning("attention is Triton's, flashinfer's does not run here: %s", error)
            return AttentionByOps(heads)
        return planned

    return attention


def _takes(heads: AttentionHeads) -> bool:
    threads = heads.num_kv_heads * heads.head_dim * heads.dtype.itemsize // _VECTOR_BYTES
    return (
        heads.dtype in flashinfer_kernels.DTYPES
        and heads.head_dim in _DIMS
        and threads <= _MOST_THREADS
    )


def _takes_pages(k_pages: Tensor) -> bool:
    *strides, last = k_pages.stride()
    return (
        last == 1
        and strides[0] < _MOST_STRIDE
        and all(stride * k_pages.itemsize % _VECTOR_BYTES == 0 for stride in strides)
    )


class FlashinferAttention:
    """The wrappers of steps that are not captured, and the memory that all wrappers share."""

    def __init__(self, flashinfer: Any, heads: AttentionHeads) -> None:
        self.flashinfer = flashinfer
        self.heads = heads
        self._by_ops = AttentionByOps(heads)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=heads.device)
        self._decode = self.decode_wrapper(1)
        self._prefill = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace(1), "NHD"
        )

    def step(self, tables: PageTables, host: PageTables, k_pages: Tensor) -> StepAttention:
        if not _takes_pages(k_pages):
            return self._by_ops.step(tables, host, k_pages)
        self._plan(tables, host, k_pages)
        return _Step(self, tables, k_pages.shape[1], self._decode, self._prefill)

    def captured(self, tables: PageTables, k_pages: Tensor) -> CapturedAttention:
        if not _takes_pages(k_pages):
            return self._by_ops.captured(tables, k_pages)
        return _Captured(self, tables, k_pages)

    def workspace(self, rows: int) -> Tensor:
        """For partial results of a decode step of `rows`, or of any prefill.

        Wrappers may share it, for their steps run one after another.
        """
        size = _workspace_bytes(self.heads, rows)
        if len(self._workspace) < size:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.heads.device)
        return self._workspace

    def decode_wrapper(self, rows: int, **captured: Any) -> Any:
        group = self.heads.num_heads // self.heads.num_kv_heads
        return self.flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(rows), "NHD", use_tensor_cores=group >= _TENSOR_CORE_GROUP, **captured
        )

    def plan_decode(self, wrapper: Any, host: PageTables, indices: Tensor, page_size: int) -> None:
        """The step's first `num_decode` rows; `indices` are on the device."""
        heads, rows = self.heads, host.num_decode
        wrapper.plan(
            self._pinned(host.kv_indptr[: rows + 1]),
            indices,
            self._pinned(_last_page_lens(host.ctx_lens[:rows], page_size)),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            page_size,
            q_data_type=heads.dtype,
            kv_data_type=heads.dtype,
            sm_scale=heads.scale,
        )

    def _plan(self, tables: PageTables, host: PageTables, k_pages: Tensor) -> None:
        heads, rows, page_size = self.heads, host.num_decode, k_pages.shape[1]
        used = int(host.kv_indptr[rows])
        if rows:
            self.plan_decode(self._decode, host, tables.kv_indices[:used], page_size)
        if rows < len(host.ctx_lens):
            self._prefill.plan(
                self._pinned(host.q_indptr[rows:] - rows),
                self._pinned(host.kv_indptr[rows:] - used),
                tables.kv_indices[used:],
                self._pinned(_last_page_lens(host.ctx_lens[rows:], page_size)),
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                page_size,
                causal=True,
                q_data_type=heads.dtype,
                kv_data_type=heads.dtype,
                sm_scale=heads.scale,
            )

    def _pinned(self, table: Tensor) -> Tensor:
        """The device copies from it without the host waiting."""
        return table.pin_memory() if self.heads.device.type == "cuda" else table


class _Step:
    def __init__(
        self,
        attention: FlashinferAttention,
        tables: PageTables,
        page_size: int,
        decode: Any,
        prefill: Any,
    ) -> None:
        self._append = attention.flashinfer.page.append_paged_kv_cache
        self._decodes = tables.num_decode
        self._decode, self._prefill = decode, prefill
        # Each token as a sequence of one page, of which it is the newest token.
        rows = torch.arange(len(tables.slots) + 1, dtype=torch.int32, device=tables.slots.device)
        page = torch.div(tables.slots, page_size, rounding_mode="floor")
        offset = (tables.slots - page * page_size).int()
        self._placed = (rows[:-1], offset, page.int(), rows, offset + 1)

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        row, offset, *sequences = self._placed
        self._append(k, v, row, offset, (k_pages, v_pages), *sequences, kv_layout="NHD")

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes, pages = self._decodes, (k_pages, v_pages)
        if decodes:
            self._decode.run(q[:decodes], pages, out=out[:decodes])
        if decodes < len(q):
            self._prefill.run(q[decodes:], pages, out=out[decodes:])
        return out


class _Captured:
    """Its wrapper reads the batch's own memory; what it adds is of a size that does not change."""

    def __init__(self, attention: FlashinferAttention, tables: PageTables, k_pages: Tensor) -> None:
        self._attention, self._indices = attention, tables.kv_indices
        self._page_size = k_pages.shape[1]
        # Rows without a slot are nothing that flashinfer's append knows.
        self._by_ops = AttentionByOps(attention.heads).captured(tables, k_pages)
        self._wrapper = attention.decode_wrapper(
            tables.num_decode,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=tables.kv_indptr,
            paged_kv_indices_buffer=tables.kv_indices,
            paged_kv_last_page_len_buffer=torch.zeros_like(tables.ctx_lens),
        )

    def plan(self, host: PageTables) -> None:
        # A copy of the memory onto itself, which torch leaves out.
        indices = self._indices[: len(host.kv_indices)]
        self._attention.plan_decode(self._wrapper, host, indices, self._page_size)

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        self._by_ops.write(k, v, k_pages, v_pages)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, (k_pages, v_pages), out=out)
        return out


def _last_page_lens(ctx_lens: Tensor, page_size: int) -> Tensor:
    return torch.where(ctx_lens > 0, (ctx_lens - 1) % page_size + 1, 0).int()


def _workspace_bytes(heads: AttentionHeads, rows: int) -> int:
    """More than flashinfer's planners ask for. They divide the work into at most two blocks for
    each multiprocessor and, captured, at least one for each row and KV head."""
    multiprocessors = 1
    if heads.device.type == "cuda":
        properties = torch.cuda.get_device_properties(heads.device)
        multiprocessors = properties.multi_processor_count
    blocks = -(-2 * multiprocessors // heads.num_kv_heads)
    # A block has a tile of queries times the heads that share their keys.
    group = heads.num_heads // heads.num_kv_heads
    tile = 16 if group <= 16 else 128
    queries = max(blocks * 128, max(blocks, 2 * rows) * tile)
    return max(_LEAST_WORKSPACE, queries * heads.num_heads * (heads.head_dim + 1) * 4 + 1024)


@dataclass(frozen=True)
class _Trial:
    """Two sequences of one token and one page each, one to decode and one to prefill."""

    slots: Tensor
    q_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    ctx_lens: Tensor
    num_decode: int

    @classmethod
    def on(cls, device: torch.device) -> _Trial:
        slots = torch.arange(2, device=device)
        bounds = torch.arange(3, dtype=torch.int32, device=device)
        return cls(slots, bounds, bounds, slots.int(), torch.ones_like(bounds[:2]), 1)


def _try(attention: PagedAttention, heads: AttentionHeads) -> None:
    """Runs a step, which also compiles the kernels. Raises what flashinfer raises."""
    pool = torch.zeros(
        (2, 2, 1, heads.num_kv_heads, heads.head_dim), dtype=heads.dtype, device=heads.device
    )
    k_pages, v_pages = pool.unbind(1)
    step = attention.step(_Trial.on(heads.device), _Trial.on(torch.device("cpu")), k_pages)
    step.write(k_pages[:, 0], v_pages[:, 0], k_pages, v_pages)
    q = pool.new_zeros(2, heads.num_heads, heads.head_dim)
    step.attend(q, k_pages, v_pages).cpu()
