"""Causal attention of new tokens over pages, for a ragged batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import native
from pd_kernels.packages import triton_kernel
from pd_kernels.paged import check_pages, check_table, compilable
from pd_kernels.registry import Op

_PrefillAttention = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor
]

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


def _compiled() -> _PrefillAttention:
    kernels = native.by_dtype("prefill_attention", "pqppp pq ppp qqq qqqq qqq f i")

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
        kernel = kernels.get(q.dtype)
        if kernel is None or not compilable(q, k_pages):
            return prefill_attention_reference(
                q, k_pages, v_pages, q_indptr, kv_indptr, kv_indices, ctx_lens, scale
            )
        geometry = check_pages(q, k_pages, v_pages)
        batch = q_indptr.shape[0] - 1
        check_table(batch, kv_indptr, kv_indices, ctx_lens)
        if q_indptr.dtype is not torch.int32 or not q_indptr.is_contiguous():
            raise ValueError("q_indptr must be contiguous int32")
        out = torch.empty_like(q)
        if kernel(
            q.data_ptr(),
            q.stride(0),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out.data_ptr(),
            q_indptr.data_ptr(),
            q.shape[0],
            kv_indptr.data_ptr(),
            kv_indices.data_ptr(),
            ctx_lens.data_ptr(),
            batch,
            kv_indices.shape[0],
            *geometry,
            scale,
            torch.get_num_threads(),
        ):
            raise IndexError(
                "the page table leaves the pages or is too short for ctx_lens, or q_indptr does "
                "not fit q and ctx_lens"
            )
        return out

    return prefill_attention


PREFILL_ATTENTION: Op[_PrefillAttention] = Op(
    "prefill_attention",
    prefill_attention_reference,
    {"cpu": _compiled, "triton": triton_kernel("prefill_attention")},
)


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
    return PREFILL_ATTENTION.of(q)(
        q, k_pages, v_pages, q_indptr, kv_indptr, kv_indices, ctx_lens, scale
    )
