"""Packing scattered pages into one block of memory, and back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_Gather = Callable[[Tensor, Tensor], Tensor]
_Scatter = Callable[[Tensor, Tensor, Tensor], None]


def page_gather_reference(pool: Tensor, pages: Tensor) -> Tensor:
    return pool.index_select(0, pages)


def page_scatter_reference(pool: Tensor, pages: Tensor, packed: Tensor) -> None:
    pool.index_copy_(0, pages.long(), packed)


PAGE_GATHER: Op[_Gather] = Op(
    "page_gather", page_gather_reference, {"triton": triton_kernel("page_gather")}
)
PAGE_SCATTER: Op[_Scatter] = Op(
    "page_scatter", page_scatter_reference, {"triton": triton_kernel("page_gather", "page_scatter")}
)


def page_gather(pool: Tensor, pages: Tensor) -> Tensor:
    """The pages of these numbers, packed: [n, num_layers, 2, page_size, Hk, D], contiguous.

    `pool` is a view [num_pages, num_layers, 2, page_size, Hk, D] of a pool of any layout, its last
    three dimensions contiguous; `pages` is [n], int32 or int64, on the pool's device.
    """
    return PAGE_GATHER.of(pool)(pool, pages)


def page_scatter(pool: Tensor, pages: Tensor, packed: Tensor) -> None:
    """Writes what `page_gather` packed to these pages of a pool; a page may come only once."""
    PAGE_SCATTER.of(pool)(pool, pages, packed)
