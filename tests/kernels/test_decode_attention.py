from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pd_kernels
from pd_kernels import decode_attention, decode_attention_reference

LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "layer_first"])
ATTENTION = pytest.mark.parametrize("attention", [decode_attention, decode_attention_reference])
# One long context alone (split over threads), a few, and more sequences than threads.
BATCHES = pytest.mark.parametrize(
    "ctx_lens",
    [[1], [16], [1500], [1, 15, 16, 17, 700], [5, 300, 2, 64, 65, 31, 32, 33, 1, 128, 90]],
    ids=["one-token", "one-page", "long", "few", "many"],
)


def queries(batch: int, dtype: torch.dtype, hq: int = 9, d: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(batch, hq, d, generator=generator).to(dtype)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.double()[None, :, None],
        k.double().transpose(0, 1)[None],
        v.double().transpose(0, 1)[None],
        scale=scale,
        enable_gqa=True,
    )
    return out[0, :, 0].to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@LAYOUTS
@BATCHES
@ATTENTION
def test_matches_torch_attention(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
    ctx_lens: list[int],
    layout: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_paged(ctx_lens, layout=layout, page_size=page_size, dtype=dtype)
    q = queries(len(ctx_lens), dtype)
    out = attention(q, batch.k_pages, batch.v_pages, *batch.table, 0.125)
    expected = [by_sdpa(row, k, v, 0.125) for row, k, v in zip(q, batch.k, batch.v, strict=True)]
    assert out.is_contiguous()
    assert_close(out, torch.stack(expected))


@pytest.mark.parametrize(("hq", "hk", "d"), [(4, 4, 64), (8, 1, 128), (6, 2, 80), (2, 1, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ATTENTION
def test_other_head_shapes(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
    dtype: torch.dtype,
    hq: int,
    hk: int,
    d: int,
) -> None:
    batch = make_paged(
        [70], layout="page_first", page_size=4, dtype=dtype, num_kv_heads=hk, head_dim=d
    )
    q = queries(1, dtype, hq, d)
    out = attention(q, batch.k_pages, batch.v_pages, *batch.table, 0.3)
    assert_close(out[0], by_sdpa(q[0], batch.k[0], batch.v[0], 0.3))


@ATTENTION
def test_strided_queries_of_a_fused_qkv(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
) -> None:
    batch = make_paged([40, 3], layout="page_first", page_size=16, dtype=torch.float32)
    q = queries(2, torch.float32, hq=15)[:, :9]
    out = attention(q, batch.k_pages, batch.v_pages, *batch.table, 0.125)
    expected = [by_sdpa(q[b], batch.k[b], batch.v[b], 0.125) for b in range(2)]
    assert_close(out, torch.stack(expected))


@LAYOUTS
@ATTENTION
def test_empty_batch(
    make_paged: Callable[..., Any], attention: Callable[..., Tensor], layout: str
) -> None:
    batch = make_paged([], layout=layout, page_size=16, dtype=torch.float32)
    out = attention(queries(0, torch.float32), batch.k_pages, batch.v_pages, *batch.table, 0.125)
    assert out.shape == (0, 9, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequences_result_depends_neither_on_its_batch_nor_on_threads(
    make_paged: Callable[..., Any], dtype: torch.dtype
) -> None:
    if pd_kernels.backend_name("cpu") != "cpu":
        pytest.skip("only the compiled kernel promises it")
    batch = make_paged([700, 3, 1500, 40], layout="page_first", page_size=4, dtype=dtype)
    q = queries(4, dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(decode_attention(q, batch.k_pages, batch.v_pages, *batch.table, 0.125))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    for b in range(4):
        first, last = batch.kv_indptr[b : b + 2].tolist()
        alone = decode_attention(
            q[b : b + 1],
            batch.k_pages,
            batch.v_pages,
            torch.tensor([0, last - first], dtype=torch.int32),
            batch.kv_indices[first:last],
            batch.ctx_lens[b : b + 1],
            0.125,
        )
        assert torch.equal(alone[0], results[0][b])
