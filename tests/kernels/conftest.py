from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass
class PagedBatch:
    """Random keys and values of some sequences, both contiguous and in permuted pages of a pool."""

    k: list[Tensor]
    v: list[Tensor]
    pool: Tensor
    k_pages: Tensor
    v_pages: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    ctx_lens: Tensor
    slots: Tensor

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kv_indptr, self.kv_indices, self.ctx_lens


MakePaged = Callable[..., PagedBatch]
_NUM_LAYERS, _LAYER = 3, 1


@pytest.fixture
def make_paged() -> MakePaged:
    """Builds a `PagedBatch` whose pool has several layers; pages that nobody owns hold NaN."""

    def make(
        ctx_lens: Sequence[int],
        *,
        layout: str,
        page_size: int,
        dtype: torch.dtype,
        num_kv_heads: int = 3,
        head_dim: int = 64,
        seed: int = 0,
    ) -> PagedBatch:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) for length in ctx_lens]
        num_pages = sum(counts) + 3
        shape = (page_size, num_kv_heads, head_dim)
        if layout == "page_first":
            pool = torch.full((num_pages, _NUM_LAYERS, 2, *shape), float("nan"), dtype=dtype)
            k_pages, v_pages = pool[:, _LAYER, 0], pool[:, _LAYER, 1]
        else:
            pool = torch.full((_NUM_LAYERS, 2, num_pages, *shape), float("nan"), dtype=dtype)
            k_pages, v_pages = pool[_LAYER, 0], pool[_LAYER, 1]
        permuted = torch.randperm(num_pages, generator=generator)
        kv_indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        kv_indptr[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
        ks, vs, slots = [], [], []
        for b, length in enumerate(ctx_lens):
            k = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            v = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            token = torch.arange(length)
            page = permuted[kv_indptr[b] : kv_indptr[b + 1]][token // page_size]
            k_pages[page, token % page_size] = k
            v_pages[page, token % page_size] = v
            ks.append(k)
            vs.append(v)
            slots.append(page * page_size + token % page_size)
        return PagedBatch(
            ks,
            vs,
            pool,
            k_pages,
            v_pages,
            kv_indptr,
            permuted[: sum(counts)].to(torch.int32),
            torch.tensor(list(ctx_lens), dtype=torch.int32),
            torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64),
        )

    return make


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Equal up to the order of float32 sums, or to one rounding of bfloat16."""

    def check(actual: Tensor, expected: Tensor) -> None:
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check
