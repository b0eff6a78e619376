"""Attention of one step's tokens over pages, planned once for all layers.

The ops of this package need no plan. flashinfer's kernels take from one how the host divided the
work, so it stands where a step begins and every layer of it uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pd_kernels.decode_attention import decode_attention
from pd_kernels.page_write import page_write
from pd_kernels.prefill_attention import prefill_attention


@dataclass(frozen=True)
class AttentionHeads:
    """What all layers of a model have in common. Scores are multiplied by `scale`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device


class PageTables(Protocol):
    """Where the tokens of a step lie: N new tokens of B sequences, the index tensors as in
    `prefill_attention`, and `slots` as in `page_write`.

    The first `num_decode` sequences have exactly one new token each, and no sequence names more
    pages than its context fills.
    """

    @property
    def slots(self) -> Tensor: ...
    @property
    def q_indptr(self) -> Tensor: ...
    @property
    def kv_indptr(self) -> Tensor: ...
    @property
    def kv_indices(self) -> Tensor: ...
    @property
    def ctx_lens(self) -> Tensor: ...
    @property
    def num_decode(self) -> int: ...


class StepAttention(Protocol):
    """A planned step; each layer calls both, with views of its own pages."""

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Writes the new tokens' k and v [N, Hk, D] to their slots."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Attention of q [N, Hq, D], each token over its context: a new [N, Hq, D]."""


class CapturedAttention(StepAttention, Protocol):
    """A decode step that is captured once and replayed for other batches of its size."""

    def plan(self, host: PageTables) -> None:
        """Before the capture and each replay, when the batch that `host` tells of is in the
        captured memory; the device must be done with the replay before."""


class PagedAttention(Protocol):
    """The attention of one model on one device. Used by one thread, on one stream."""

    def step(self, tables: PageTables, host: PageTables, k_pages: Tensor) -> StepAttention:
        """Plans one step of `tables`, whose copy on the CPU is `host`.

        `k_pages` is any layer's: all have its page size and strides. The device must be done with
        the step before, for plans share memory.
        """

    def captured(self, tables: PageTables, k_pages: Tensor) -> CapturedAttention:
        """A step of decode rows whose batch will lie in the memory of `tables`. Of these rows,
        those with a slot of -1 write nothing."""


class _PlannedByOps:
    def __init__(self, tables: PageTables, scale: float) -> None:
        decodes = tables.num_decode
        self._slots, self._scale, self._decodes = tables.slots, scale, decodes
        indices = tables.kv_indices
        self._decode = (tables.kv_indptr[: decodes + 1], indices, tables.ctx_lens[:decodes])
        self._prefill: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        if decodes < tables.ctx_lens.shape[0]:
            queries = tables.q_indptr[decodes:] - decodes
            kv_indptr, ctx_lens = tables.kv_indptr[decodes:], tables.ctx_lens[decodes:]
            self._prefill = (queries, kv_indptr, indices, ctx_lens)

    def plan(self, host: PageTables) -> None:
        """All that changes is in the captured memory."""

    def write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        page_write(k, v, k_pages, v_pages, self._slots)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        parts = []
        if self._decodes:
            queries = q[: self._decodes]
            parts.append(decode_attention(queries, k_pages, v_pages, *self._decode, self._scale))
        if self._prefill is not None:
            queries = q[self._decodes :]
            parts.append(prefill_attention(queries, k_pages, v_pages, *self._prefill, self._scale))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class AttentionByOps:
    """By the ops that each device has."""

    def __init__(self, heads: AttentionHeads) -> None:
        self._scale = heads.scale

    def step(self, tables: PageTables, host: PageTables, k_pages: Tensor) -> StepAttention:
        return _PlannedByOps(tables, self._scale)

    def captured(self, tables: PageTables, k_pages: Tensor) -> CapturedAttention:
        return _PlannedByOps(tables, self._scale)
