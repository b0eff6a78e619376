from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton_kernels.launch import padded

_BLOCK_HEADS = 8


@triton.jit
def _rotate(
    heads, row, stride, first_head, num_heads, cos, sin, dim, in_half, HALF, BLOCK: tl.constexpr
):
    head = first_head + tl.arange(0, BLOCK)
    at = heads + row * stride + head[:, None] * (2 * HALF) + dim[None, :]
    inside = (head < num_heads)[:, None] & in_half[None, :]
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def _kernel(
    q,
    k,
    positions,
    cos_sin,
    q_stride,
    k_stride,
    q_heads,
    k_heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Of one token, a block of q's heads or, after those, of k's."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dim = tl.arange(0, HALF_BLOCK)
    in_half = dim < HALF
    table = cos_sin + tl.load(positions + row) * (2 * HALF) + dim
    cos = tl.load(table, mask=in_half, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=in_half, other=0.0)[None, :]
    q_parts = tl.cdiv(q_heads, BLOCK_HEADS)
    if part < q_parts:
        first = part * BLOCK_HEADS
        _rotate(q, row, q_stride, first, q_heads, cos, sin, dim, in_half, HALF, BLOCK_HEADS)
    else:
        first = (part - q_parts) * BLOCK_HEADS
        _rotate(k, row, k_stride, first, k_heads, cos, sin, dim, in_half, HALF, BLOCK_HEADS)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    n, q_heads, dim = q.shape
    k_heads = k.shape[1]
    if q.stride()[1:] != (dim, 1) or k.stride()[1:] != (dim, 1):
        raise ValueError("the heads of a token must lie side by side")
    if n:
        parts = triton.cdiv(q_heads, _BLOCK_HEADS) + triton.cdiv(k_heads, _BLOCK_HEADS)
        _kernel[(n, parts)](
            q,
            k,
            positions,
            cos_sin,
            q.stride(0),
            k.stride(0),
            q_heads,
            k_heads,
            HALF=dim // 2,
            HALF_BLOCK=padded(dim // 2),
            BLOCK_HEADS=_BLOCK_HEADS,
        )
