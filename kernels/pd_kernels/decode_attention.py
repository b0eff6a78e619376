"""Attention of one new token per sequence over its pages."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.prefill_attention import prefill_attention_reference
from pd_kernels.registry import Op


def decode_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    ctx_lens: Tensor,
    scale: float,
) -> Tensor:
    q_indptr = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return prefill_attention_reference(
        q, k_pages, v_pages, q_indptr, kv_indptr, kv_indices, ctx_lens, scale
    )


DECODE_ATTENTION = Op("decode_attention", decode_attention_reference)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    ctx_lens: Tensor,
    scale: float,
) -> Tensor:
    """`prefill_attention` with exactly one query per sequence: q [B, Hq, D] to a new [B, Hq, D].

    The page table (`kv_indptr` [B + 1], `kv_indices`, `ctx_lens` [B], all int32), the pages' views
    and `scale` are as there. The newest token's own key and value are in its page already.
    """
    return DECODE_ATTENTION.on(q.device.type)(
        q, k_pages, v_pages, kv_indptr, kv_indices, ctx_lens, scale
    )
