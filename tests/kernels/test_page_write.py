from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pd_kernels import page_write, page_write_reference

LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "layer_first"])
WRITES = pytest.mark.parametrize("write", [page_write, page_write_reference])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@LAYOUTS
@WRITES
def test_tokens_land_in_their_slots_and_nowhere_else(
    make_paged: Callable[..., Any],
    write: Callable[..., None],
    layout: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_paged([1, 16, 17, 33], layout=layout, page_size=page_size, dtype=dtype)
    expected = batch.pool.clone()
    batch.k_pages.fill_(float("nan"))
    batch.v_pages.fill_(float("nan"))
    order = torch.randperm(len(batch.slots), generator=torch.Generator().manual_seed(5))
    qkv = torch.cat([torch.cat(batch.k), torch.cat(batch.v)], dim=1)[order]  # strided, as in use
    k, v = qkv.split(3, dim=1)
    write(k, v, batch.k_pages, batch.v_pages, batch.slots[order])
    assert torch.equal(batch.pool.nan_to_num(7.0), expected.nan_to_num(7.0))


@LAYOUTS
@WRITES
def test_no_tokens_write_nothing(
    make_paged: Callable[..., Any], write: Callable[..., None], layout: str
) -> None:
    batch = make_paged([4], layout=layout, page_size=4, dtype=torch.float32)
    before = batch.pool.clone()
    none = torch.zeros(0, 3, 64)
    write(none, none, batch.k_pages, batch.v_pages, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(batch.pool.nan_to_num(7.0), before.nan_to_num(7.0))
