"""Attention over some tokens after others: the softmax as it goes along, in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from pd_kernels.triton_kernels.launch import product

LOG2_E = 1.4426950408889634


@triton.jit
def load_keys(
    k_pages, pages, token, seen, in_dim, head, page_stride, token_stride, head_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys of some tokens of one KV head, and where their values lie: offsets and mask."""
    dim = tl.arange(0, BLOCK_D)
    page = tl.load(pages + token // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
    base = page * page_stride + (token % PAGE_SIZE) * token_stride + head * head_stride
    at = base[:, None] + dim[None, :]
    there = seen[:, None] & in_dim[None, :]
    return tl.load(k_pages + at, mask=there, other=0.0), at, there


@triton.jit
def fold(scores, values, largest, total, sums, WIDE: tl.constexpr):
    """The rows' largest score, sum of weights and weighed sum of values, with these tokens' too."""
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(largest - higher)
    total = total * fade + tl.sum(weights, axis=1)
    sums = sums * fade[:, None] + product(weights.to(values.dtype), values, WIDE)
    return higher, total, sums
