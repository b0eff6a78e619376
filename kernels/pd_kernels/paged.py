"""What the compiled attention kernels ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

# Head sizes and heads per KV head in use are within these; others run as plain torch.
_LANES = 16  # the widest vector
_MAX_GROUP = 192


def compilable(q: Tensor, k_pages: Tensor) -> bool:
    return q.shape[2] % _LANES == 0 and q.shape[1] <= _MAX_GROUP * k_pages.shape[2]


def check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> tuple[int, ...]:
    """The pages' geometry as the kernels take it, strides in elements: num_pages, page_size, page
    stride, token stride, head stride, KV heads, query heads per KV head, head_dim.

    Raises ValueError for tensors that do not fit together.
    """
    num_heads, dim = q.shape[1:]
    num_pages, page_size, kv_heads, page_dim = k_pages.shape
    page_stride, token_stride, head_stride, last = strides = k_pages.stride()
    if k_pages.dtype is not q.dtype or v_pages.dtype is not q.dtype:
        raise ValueError("q and the pages must have one dtype")
    if page_dim != dim or num_heads % kv_heads:
        raise ValueError(f"{num_heads} heads of {dim} do not go with pages {tuple(k_pages.shape)}")
    if v_pages.shape != k_pages.shape or v_pages.stride() != strides:
        raise ValueError("k_pages and v_pages must have the same shape and strides")
    if last != 1 or q.stride()[1:] != (dim, 1):
        raise ValueError("a token's heads in q, and every head, must be contiguous")
    return (
        num_pages,
        page_size,
        page_stride,
        token_stride,
        head_stride,
        kv_heads,
        num_heads // kv_heads,
        dim,
    )


def check_table(batch: int, kv_indptr: Tensor, kv_indices: Tensor, ctx_lens: Tensor) -> None:
    """Raises ValueError for a page table of wrong dtype or length; the kernels check its values."""
    if kv_indptr.shape[0] != batch + 1 or ctx_lens.shape[0] != batch:
        raise ValueError(f"kv_indptr and ctx_lens do not fit a batch of {batch}")
    for table in (kv_indptr, kv_indices, ctx_lens):
        if table.dtype is not torch.int32 or not table.is_contiguous():
            raise ValueError("a page table is of contiguous int32")
