from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton_kernels.launch import padded


@triton.jit
def _kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    page_stride,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    element = tl.arange(0, BLOCK)
    head, dim = element // DIM, element % DIM
    # A row that only fills up a captured batch has a negative slot.
    inside = (element < HEADS * DIM) & (slot >= 0)
    token = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * token_stride
    target = token + head * head_stride + dim
    key = tl.load(k + row * k_token + head * k_head + dim, mask=inside)
    value = tl.load(v + row * v_token + head * v_head + dim, mask=inside)
    tl.store(k_pages + target, key, mask=inside)
    tl.store(v_pages + target, value, mask=inside)


def page_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    n, heads, dim = k.shape
    if v_pages.stride() != k_pages.stride():
        raise ValueError("k_pages and v_pages must have the same strides")
    if not k.stride(2) == v.stride(2) == k_pages.stride(3) == 1:
        raise ValueError("the last dimension must be contiguous")
    if n:
        block = padded(heads * dim)
        _kernel[(n,)](
            k,
            v,
            k_pages,
            v_pages,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *k_pages.stride()[:3],
            PAGE_SIZE=k_pages.shape[1],
            HEADS=heads,
            DIM=dim,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
