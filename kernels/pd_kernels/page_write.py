"""Scattering new tokens' keys and values into their pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import native
from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_PageWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def page_write_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> None:
    page_size = k_pages.shape[1]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    k_pages.index_put_((page, offset), k)
    v_pages.index_put_((page, offset), v)


def _compiled() -> _PageWrite:
    kernel = native.function("page_write", "pqq pqq pp qqq p qqqqq i")

    def page_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        n, heads, dim = k.shape
        num_pages, page_size = k_pages.shape[:2]
        dtype, strides = k.dtype, k_pages.stride()
        if (
            v.shape != k.shape
            or k_pages.shape[2:] != (heads, dim)
            or v_pages.shape != k_pages.shape
        ):
            raise ValueError("k and v must have one shape, and k_pages and v_pages its heads")
        if v.dtype is not dtype or k_pages.dtype is not dtype or v_pages.dtype is not dtype:
            raise ValueError("k, v and the pages must have one dtype")
        if strides != v_pages.stride():
            raise ValueError("k_pages and v_pages must have the same strides")
        if not k.stride(2) == v.stride(2) == strides[3] == 1:
            raise ValueError("the last dimension must be contiguous")
        if slots.dtype is not torch.int64 or slots.shape != (n,) or not slots.is_contiguous():
            raise ValueError(f"slots must be {n} contiguous int64")
        size = k.element_size()
        if kernel(
            k.data_ptr(),
            k.stride(0) * size,
            k.stride(1) * size,
            v.data_ptr(),
            v.stride(0) * size,
            v.stride(1) * size,
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            strides[0] * size,
            strides[1] * size,
            strides[2] * size,
            slots.data_ptr(),
            n,
            num_pages,
            page_size,
            heads,
            dim * size,
            torch.get_num_threads(),
        ):
            raise IndexError(f"a slot is outside of {num_pages} pages of {page_size} tokens")

    return page_write


PAGE_WRITE: Op[_PageWrite] = Op(
    "page_write", page_write_reference, {"cpu": _compiled, "triton": triton_kernel("page_write")}
)


def page_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Writes token i's `k[i]` and `v[i]` to slot `slots[i]`, which is page * page_size + offset.

    `k` and `v` are [N, Hk, D] (any strides but in the last dimension), `slots` is [N] int64.
    `k_pages` and `v_pages` are views [num_pages, page_size, Hk, D] of a pool, of the same dtype and
    with any strides but in the last dimension, the same for both.
    A slot twice in `slots` gets either value. Raises IndexError for a slot outside of the pages on
    the CPU; on CUDA, where slots are not read by the host, a negative one writes nothing.
    """
    PAGE_WRITE.of(k)(k, v, k_pages, v_pages, slots)
