"""Attention of one new token per sequence over its pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import native
from pd_kernels.packages import triton_kernel
from pd_kernels.paged import check_pages, check_table, compilable
from pd_kernels.prefill_attention import prefill_attention_reference
from pd_kernels.registry import Op

_DecodeAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


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


def _compiled() -> _DecodeAttention:
    kernels = native.by_dtype("decode_attention", "pqppp ppp qqq qqqq qqq f i")

    def decode_attention(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        ctx_lens: Tensor,
        scale: float,
    ) -> Tensor:
        kernel = kernels.get(q.dtype)
        if kernel is None or not compilable(q, k_pages):
            return decode_attention_reference(
                q, k_pages, v_pages, kv_indptr, kv_indices, ctx_lens, scale
            )
        geometry = check_pages(q, k_pages, v_pages)
        batch = q.shape[0]
        check_table(batch, kv_indptr, kv_indices, ctx_lens)
        out = torch.empty_like(q)
        if kernel(
            q.data_ptr(),
            q.stride(0),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out.data_ptr(),
            kv_indptr.data_ptr(),
            kv_indices.data_ptr(),
            ctx_lens.data_ptr(),
            batch,
            kv_indices.shape[0],
            *geometry,
            scale,
            torch.get_num_threads(),
        ):
            raise IndexError("the page table leaves the pages, or a sequence has too few of them")
        return out

    return decode_attention


DECODE_ATTENTION: Op[_DecodeAttention] = Op(
    "decode_attention",
    decode_attention_reference,
    {"cpu": _compiled, "triton": triton_kernel("decode_attention")},
)


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
    return DECODE_ATTENTION.of(q)(q, k_pages, v_pages, kv_indptr, kv_indices, ctx_lens, scale)
