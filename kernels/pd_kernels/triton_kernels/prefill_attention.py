from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.paged import check_pages
from pd_kernels.triton_kernels.launch import INTERPRETED, padded, product
from pd_kernels.triton_kernels.softmax import LOG2_E, fold, load_keys

_INDICES = ["q_indptr", "kv_indptr", "kv_indices", "ctx_lens"]


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def _attend(
    q,
    k_pages,
    v_pages,
    out,
    q_indptr,
    kv_indptr,
    kv_indices,
    ctx_lens,
    batch,
    scale,
    q_stride,
    out_stride,
    page_stride,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`BLOCK_M` queries of one sequence and one head.

    The sequences' blocks are numbered through; which one is a program's, it finds out itself, for
    the host does not know how the queries are divided among the sequences.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    each = tl.arange(0, BLOCK_B)
    first = tl.load(q_indptr + each, mask=each < batch, other=0)
    last = tl.load(q_indptr + each + 1, mask=each < batch, other=0)
    blocks = tl.cdiv(last - first, BLOCK_M)
    b = tl.sum((tl.cumsum(blocks, axis=0) <= number).to(tl.int32), axis=0)
    if b < batch:
        before = tl.sum(tl.where(each < b, blocks, 0), axis=0)
        q_begin = tl.load(q_indptr + b)
        q_len = tl.load(q_indptr + b + 1) - q_begin
        context = tl.load(ctx_lens + b)
        row = (number - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        in_dim = dim < DIM
        inside = (row < q_len)[:, None] & in_dim[None, :]
        query = (q_begin + row).to(tl.int64)
        queries = tl.load(
            q + query[:, None] * q_stride + head * DIM + dim[None, :], mask=inside, other=0.0
        )
        position = context - q_len + row
        end = tl.minimum(context - q_len + (number - before + 1) * BLOCK_M, context)
        kv_head = head // GROUP
        pages = kv_indices + tl.load(kv_indptr + b)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for at in range(0, end, BLOCK_N):
            token = at + tl.arange(0, BLOCK_N)
            seen = token < end
            keys, place, there = load_keys(
                k_pages, pages, token, seen, in_dim, kv_head,
                page_stride, token_stride, head_stride, PAGE_SIZE, BLOCK_D,
            )  # fmt: skip
            scores = product(queries, tl.trans(keys), WIDE) * scale
            # Token 0 is seen by all rows, so no row's largest score stays minus infinity.
            visible = token[None, :] <= tl.minimum(position, end - 1)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            values = tl.load(v_pages + place, mask=there, other=0.0)
            largest, total, sums = fold(scores, values, largest, total, sums, WIDE)
        sums = sums / total[:, None]
        at_out = out + query[:, None] * out_stride + head * DIM + dim[None, :]
        tl.store(at_out, sums.to(out.dtype.element_ty), mask=inside)


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
    _, page_size, *strides, _, group, dim = check_pages(q, k_pages, v_pages)
    tokens, heads = q.shape[:2]
    batch = q_indptr.shape[0] - 1
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    block_d, narrow = padded(dim, 16), q.dtype.itemsize < 4
    block_m, block_n = (128, 64) if narrow and block_d <= 128 else (32, 32)
    # As many blocks as any division of the queries among the sequences could have.
    blocks = triton.cdiv(tokens, block_m) + batch - 1
    _attend[(heads, blocks)](
        q,
        k_pages,
        v_pages,
        out,
        q_indptr,
        kv_indptr,
        kv_indices,
        ctx_lens,
        batch,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        *strides,
        PAGE_SIZE=page_size,
        GROUP=group,
        DIM=dim,
        BLOCK_B=padded(batch, 32),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        WIDE=INTERPRETED,
        num_warps=8 if narrow and block_d == 128 else 4,
        num_stages=3 if narrow else 2,
    )
    return out
