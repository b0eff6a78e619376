from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.paged import check_pages
from pd_kernels.triton_kernels.launch import INTERPRETED, multiprocessors, padded, product
from pd_kernels.triton_kernels.softmax import LOG2_E, fold, load_keys

# Rows of a matrix unit's smallest product; smaller groups of heads are filled up.
_LEAST_ROWS = 16
_MOST_SPLITS = 16
_INDICES = ["kv_indptr", "kv_indices", "ctx_lens"]


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _attend(
    q,
    k_pages,
    v_pages,
    out,
    log_sums,
    kv_indptr,
    kv_indices,
    ctx_lens,
    scale,
    q_stride,
    page_stride,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The heads of one KV head over one of `SPLITS` parts of a context.

    `out` and `log_sums` are [B, Hq, SPLITS, D] and [B, Hq, SPLITS]; the latter, in base 2, are of
    use to `_merge` only.
    """
    b, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(ctx_lens + b)
    part = tl.cdiv(tl.cdiv(context, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, context)
    row, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_dim = dim < DIM
    inside = (row < GROUP)[:, None] & in_dim[None, :]
    head = kv_head * GROUP + row
    queries = tl.load(q + b * q_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    pages = kv_indices + tl.load(kv_indptr + b)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for at in range(begin, end, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        seen = token < end
        keys, place, there = load_keys(
            k_pages, pages, token, seen, in_dim, kv_head,
            page_stride, token_stride, head_stride, PAGE_SIZE, BLOCK_D,
        )  # fmt: skip
        scores = product(queries, tl.trans(keys), WIDE) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values = tl.load(v_pages + place, mask=there, other=0.0)
        largest, total, sums = fold(scores, values, largest, total, sums, WIDE)
    # An empty context, which only fills up a captured batch, gets zeros.
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    place = (b * tl.num_programs(1) * GROUP + head) * SPLITS + split
    tl.store(out + place[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        log_sum = largest + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(log_sums + place, log_sum, mask=row < GROUP)


@triton.jit
def _merge(parts, log_sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The parts of one head, each weighed by the sum that its softmax divided by."""
    place = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    logs = tl.load(log_sums + place * SPLITS + split)
    largest = tl.max(logs, axis=0)
    # Parts without a token have a log of minus infinity; all have in an empty context.
    weights = tl.exp2(logs - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    at = parts + (place * SPLITS + split)[:, None] * DIM + dim[None, :]
    each = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    merged = tl.sum(each * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    ctx_lens: Tensor,
    scale: float,
) -> Tensor:
    _, page_size, *strides, kv_heads, group, dim = check_pages(q, k_pages, v_pages)
    batch, heads = q.shape[:2]
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    if not batch:
        return out
    # Of the batch's size alone: how long its contexts are, only the device knows.
    wanted = triton.cdiv(2 * multiprocessors(q), batch * kv_heads)
    splits = min(_MOST_SPLITS, padded(wanted))
    block_d, narrow = padded(dim, 16), q.dtype.itemsize < 4
    parts = log_sums = out
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    _attend[(batch, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        parts,
        log_sums,
        kv_indptr,
        kv_indices,
        ctx_lens,
        scale * LOG2_E,
        q.stride(0),
        *strides,
        PAGE_SIZE=page_size,
        GROUP=group,
        DIM=dim,
        SPLITS=splits,
        BLOCK_H=padded(group, _LEAST_ROWS),
        BLOCK_D=block_d,
        BLOCK_N=64 if narrow and block_d <= 128 else 32,
        WIDE=INTERPRETED,
        num_warps=4,
        num_stages=3 if narrow else 2,
    )
    if splits > 1:
        _merge[(batch * heads,)](
            parts, log_sums, out, DIM=dim, SPLITS=splits, BLOCK_D=block_d, num_warps=4
        )
    return out
