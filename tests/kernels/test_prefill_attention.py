from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pd_kernels
from pd_kernels import prefill_attention, prefill_attention_reference

LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "layer_first"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ATTENTION = pytest.mark.parametrize("attention", [prefill_attention, prefill_attention_reference])
# (new tokens, tokens in all): first chunks, later chunks, one token, page boundaries, nothing new.
RAGGED = [(1, 1), (16, 16), (5, 21), (1, 64), (0, 9), (33, 33), (150, 150), (17, 300)]


def queries(q_lens: Sequence[int], dtype: torch.dtype, hq: int = 9, d: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(sum(q_lens), hq, d, generator=generator).to(dtype)


def indptr(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int32).cumsum(0).tolist()]).int()


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q's tokens, the last of k's and v's, by torch's own attention."""
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    out = F.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None],
        k.double().transpose(0, 1)[None],
        v.double().transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).to(q.dtype)


@DTYPES
@PAGE_SIZES
@LAYOUTS
@ATTENTION
def test_ragged_batch_matches_torch_attention(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
    layout: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    q_lens = [new for new, _ in RAGGED]
    batch = make_paged([ctx for _, ctx in RAGGED], layout=layout, page_size=page_size, dtype=dtype)
    q = queries(q_lens, dtype)
    out = attention(q, batch.k_pages, batch.v_pages, indptr(q_lens), *batch.table, 0.125)
    expected = [
        by_sdpa(rows, k, v, 0.125)
        for rows, k, v in zip(q.split(q_lens), batch.k, batch.v, strict=True)
    ]
    assert out.is_contiguous()
    assert_close(out, torch.cat(expected))


@pytest.mark.parametrize(("hq", "hk", "d"), [(4, 4, 64), (8, 1, 128), (6, 2, 80), (2, 1, 20)])
@DTYPES
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
    q = queries([35], dtype, hq, d)
    out = attention(q, batch.k_pages, batch.v_pages, indptr([35]), *batch.table, 0.3)
    assert_close(out, by_sdpa(q, batch.k[0], batch.v[0], 0.3))


@ATTENTION
def test_strided_queries_of_a_fused_qkv(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
) -> None:
    batch = make_paged([40], layout="page_first", page_size=16, dtype=torch.float32)
    fused = queries([40], torch.float32, hq=15)
    out = attention(fused[:, :9], batch.k_pages, batch.v_pages, indptr([40]), *batch.table, 0.125)
    assert_close(out, by_sdpa(fused[:, :9], batch.k[0], batch.v[0], 0.125))


@ATTENTION
def test_large_scores_do_not_overflow(
    make_paged: Callable[..., Any],
    assert_close: Callable[[Tensor, Tensor], None],
    attention: Callable[..., Tensor],
) -> None:
    batch = make_paged([200], layout="page_first", page_size=1, dtype=torch.float32)
    q = queries([200], torch.float32) * 100
    out = attention(q, batch.k_pages, batch.v_pages, indptr([200]), *batch.table, 1.0)
    expected = by_sdpa(q, batch.k[0], batch.v[0], 1.0)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@LAYOUTS
@ATTENTION
def test_empty_batch(
    make_paged: Callable[..., Any], attention: Callable[..., Tensor], layout: str
) -> None:
    batch = make_paged([], layout=layout, page_size=16, dtype=torch.float32)
    q = queries([], torch.float32)
    out = attention(q, batch.k_pages, batch.v_pages, indptr([]), *batch.table, 0.125)
    assert out.shape == (0, 9, 64)


@DTYPES
def test_chunks_compute_what_the_whole_prompt_does(
    make_paged: Callable[..., Any], dtype: torch.dtype
) -> None:
    if pd_kernels.backend_name("cpu") != "cpu":
        pytest.skip("only the compiled kernel promises it to the bit")
    batch = make_paged([300], layout="page_first", page_size=4, dtype=dtype)
    q = queries([300], dtype)
    whole = prefill_attention(q, batch.k_pages, batch.v_pages, indptr([300]), *batch.table, 0.125)
    for start, end in ((0, 1), (1, 130), (130, 299), (299, 300)):
        chunk = prefill_attention(
            q[start:end],
            batch.k_pages,
            batch.v_pages,
            indptr([end - start]),
            batch.kv_indptr,
            batch.kv_indices,
            torch.tensor([end], dtype=torch.int32),
            0.125,
        )
        assert torch.equal(chunk, whole[start:end])
