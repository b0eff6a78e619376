"""Scattering new tokens' keys and values into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.registry import Op


def page_write_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> None:
    page_size = k_pages.shape[1]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    k_pages.index_put_((page, offset), k)
    v_pages.index_put_((page, offset), v)


PAGE_WRITE = Op("page_write", page_write_reference)


def page_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Writes token i's `k[i]` and `v[i]` to slot `slots[i]`, which is page * page_size + offset.

    `k` and `v` are [N, Hk, D] (any strides but in the last dimension), `slots` is [N] int64.
    `k_pages` and `v_pages` are views [num_pages, page_size, Hk, D] of a pool, of the same dtype and
    with any strides but in the last dimension. A slot twice in `slots` gets either value.
    """
    PAGE_WRITE.on(k.device.type)(k, v, k_pages, v_pages, slots)
