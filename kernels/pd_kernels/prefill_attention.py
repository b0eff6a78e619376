"""Causal attention of new tokens over pages, for a ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.registry import Op

# Queries that the reference scores at once: bounds its memory to this many rows of the context.
_QUERY_BLOCK = 128


def attend_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention in float32: q [T, Hq, D], the last T of the S tokens of k, v [S, Hk, D]."""
    num_queries, num_heads, head_dim = q.shape
    context, num_kv_heads = k.shape[:2]
    grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,skd->kgts", grouped, k.float()) * scale
    last_visible = torch.arange(context - num_queries, context, device=q.device)
    hidden = torch.arange(context, device=q.device) > last_visible[:, None]
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("kgts,skd->tkgd", weights, v.float())
    return out.reshape(num_queries, num_heads, head_dim).to(q.dtype)


def prefill_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    ctx_lens: Tensor,
    scale: float,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    q_bounds, kv_bounds = q_indptr.tolist(), kv_indptr.tolist()
    for b, context in enumerate(ctx_lens.tolist()):
        pages = kv_indices[kv_bounds[b] : kv_bounds[b + 1]].long()
        k = k_pages[pages].flatten(0, 1)[:context]
        v = v_pages[pages].flatten(0, 1)[:context]
        first, last = q_bounds[b], q_bounds[b + 1]
        for start in range(first, last, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, last)
            visible = context - (last - end)
            out[start:end] = attend_reference(q[start:end], k[:visible], v[:visible], scale)
    return out


PREFILL_ATTENTION = Op("prefill_attention", prefill_attention_reference)


def prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    ctx_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each sequence's newest tokens over its pages. Returns [N, Hq, D] of q's dtype.

    `q` is [N, Hq, D]; sequence b's queries are rows `q_indptr[b]` to `q_indptr[b + 1]`, and they
    are the last of the `ctx_lens[b]` tokens in its pages: their own keys and values have been
    written already. Its pages are `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`, in order.
    `k_pages` and `v_pages` are views [num_pages, page_size, Hk, D] of a pool, Hk dividing Hq, with
    any strides but in the last dimension. Index tensors are int32: q_indptr and kv_indptr [B + 1],
    ctx_lens [B]. Scores are multiplied by `scale`; softmax and sums are in float32.
    """
    return PREFILL_ATTENTION.on(q.device.type)(
        q, k_pages, v_pages, q_indptr, kv_indptr, kv_indices, ctx_lens, scale
    )
