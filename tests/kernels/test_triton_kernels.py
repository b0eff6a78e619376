"""The Triton kernels against the references of their ops: interpreted, or on a GPU where one is.

Small sizes, as the interpreter runs each program of a launch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pd_kernels
from pd_kernels import registry

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "layer_first"])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Query heads, KV heads, head_dim: grouped as in the default model, one for all, odd sizes.
HEADS = pytest.mark.parametrize(("hq", "hk", "d"), [(2, 2, 64), (4, 1, 128), (4, 2, 20)])
Close = Callable[[Tensor, Tensor], None]


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with registry.preferring(DEVICE, "triton"):
        yield


@pytest.fixture
def assert_close() -> Close:
    """As for the CPU's kernels, but that softmax weights too are rounded to bfloat16; and where
    hardware rounds, the interpreter cuts off."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.is_contiguous()
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check


def rand(*shape: int, dtype: torch.dtype, seed: int = 1, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def moved(batch: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The batch's pages and table on the device, the pages still views of one pool."""
    pool = batch.pool.to(DEVICE)
    pages = [
        pool.as_strided(each.shape, each.stride(), each.storage_offset())
        for each in (batch.k_pages, batch.v_pages)
    ]
    return pages[0], pages[1], tuple(each.to(DEVICE) for each in batch.table)


def test_every_op_runs_in_triton() -> None:
    assert pd_kernels.backend_name(DEVICE) == "triton"


@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (5, 2500), (3, 7)])
def test_silu_and_mul(tokens: int, width: int, dtype: torch.dtype, assert_close: Close) -> None:
    x = rand(tokens, 2 * width, dtype=dtype, scale=4.0)
    assert_close(pd_kernels.silu_and_mul(x), pd_kernels.silu_and_mul_reference(x))


@DTYPES
@pytest.mark.parametrize("shape", [(0, 576), (5, 576), (3, 7)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, assert_close: Close) -> None:
    wide = rand(shape[0], 2 * shape[1], dtype=dtype, scale=3.0)
    x, residual = wide[:, : shape[1]], rand(*shape, dtype=dtype, seed=2)
    weight, before = rand(shape[1], dtype=dtype, seed=3), x.clone()
    expected = pd_kernels.rms_norm_reference(x, weight, 1e-5)
    assert_close(pd_kernels.rms_norm(x, weight, 1e-5), expected)
    total = residual.clone()
    expected = pd_kernels.fused_add_rms_norm_reference(x, total, weight, 1e-5)
    assert_close(pd_kernels.fused_add_rms_norm(x, residual, weight, 1e-5), expected)
    assert_close(residual, total)
    assert torch.equal(x, before)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "hq", "hk", "d"), [(0, 9, 3, 64), (4, 9, 3, 64), (2, 4, 4, 128), (3, 2, 1, 6)]
)
def test_rope(
    tokens: int, hq: int, hk: int, d: int, dtype: torch.dtype, assert_close: Close
) -> None:
    table = pd_kernels.rope_cos_sin(pd_kernels.rope_frequencies(d, 1e4), 500).to(DEVICE)
    positions = torch.tensor([499, 0, 77, 3], device=DEVICE)[:tokens]
    qkv = rand(tokens, hq + 2 * hk, d, dtype=dtype)
    expected = qkv.clone()
    pd_kernels.rope_reference(expected[:, :hq], expected[:, hq:-hk], positions, table)
    pd_kernels.rope(qkv[:, :hq], qkv[:, hq:-hk], positions, table)
    assert_close(qkv, expected)


@DTYPES
@PAGE_SIZES
@LAYOUTS
def test_page_write(
    make_paged: Callable[..., Any], layout: str, page_size: int, dtype: torch.dtype
) -> None:
    batch = make_paged([1, 16, 17], layout=layout, page_size=page_size, dtype=dtype)
    expected = batch.pool.clone()
    batch.k_pages.fill_(float("nan"))
    batch.v_pages.fill_(float("nan"))
    k_pages, v_pages, _ = moved(batch)
    qkv = torch.cat([torch.cat(batch.k), torch.cat(batch.v)], dim=1).to(DEVICE)
    extra = torch.full((2, *qkv.shape[1:]), 5.0, dtype=dtype, device=DEVICE)
    k, v = torch.cat([qkv, extra]).split(3, dim=1)
    # Rows that fill up a captured batch have no slot.
    slots = torch.cat([batch.slots, torch.tensor([-1, -1])]).to(DEVICE)
    pd_kernels.page_write(k, v, k_pages, v_pages, slots)
    pool = k_pages.as_strided(expected.shape, expected.stride(), 0).cpu()
    assert torch.equal(pool.nan_to_num(7.0), expected.nan_to_num(7.0))


@PAGE_SIZES
@LAYOUTS
def test_page_gather_and_scatter(
    make_paged: Callable[..., Any], layout: str, page_size: int
) -> None:
    batch = make_paged([70], layout=layout, page_size=page_size, dtype=torch.bfloat16)
    pool = batch.pool.to(DEVICE)
    pool.copy_(rand(*pool.shape, dtype=pool.dtype))
    pages = pool if layout == "page_first" else pool.permute(2, 0, 1, 3, 4, 5)
    chosen = int32(3, 0, 4)
    packed = pd_kernels.page_gather(pages, chosen)
    assert packed.is_contiguous()
    assert torch.equal(packed, pd_kernels.page_gather_reference(pages, chosen))
    expected, into = pages.clone(), int32(1, 4, 2)
    pd_kernels.page_scatter_reference(expected, into, packed)
    pd_kernels.page_scatter(pages, into, packed)
    assert torch.equal(pages, expected)


@DTYPES
@PAGE_SIZES
@LAYOUTS
@pytest.mark.parametrize("ctx_lens", [[150], [1, 16, 0, 33, 7]], ids=["split", "ragged"])
def test_decode_attention(
    make_paged: Callable[..., Any],
    assert_close: Close,
    ctx_lens: list[int],
    layout: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_paged(
        ctx_lens, layout=layout, page_size=page_size, dtype=dtype, num_kv_heads=2, head_dim=32
    )
    k_pages, v_pages, table = moved(batch)
    q = rand(len(ctx_lens), 8, 32, dtype=dtype)[:, :6]  # strided, as in a fused qkv
    out = pd_kernels.decode_attention(q, k_pages, v_pages, *table, 0.125)
    expected = pd_kernels.decode_attention_reference(q, k_pages, v_pages, *table, 0.125)
    # No tokens: a row that fills up a captured batch.
    assert_close(out, expected.nan_to_num(0.0))


@DTYPES
@HEADS
def test_decode_attention_of_other_head_shapes(
    make_paged: Callable[..., Any],
    assert_close: Close,
    hq: int,
    hk: int,
    d: int,
    dtype: torch.dtype,
) -> None:
    batch = make_paged(
        [70], layout="page_first", page_size=4, dtype=dtype, num_kv_heads=hk, head_dim=d
    )
    k_pages, v_pages, table = moved(batch)
    q = rand(1, hq, d, dtype=dtype)
    out = pd_kernels.decode_attention(q, k_pages, v_pages, *table, 0.3)
    expected = pd_kernels.decode_attention_reference(q, k_pages, v_pages, *table, 0.3)
    assert_close(out, expected)


@DTYPES
@PAGE_SIZES
@LAYOUTS
def test_prefill_attention(
    make_paged: Callable[..., Any],
    assert_close: Close,
    layout: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    """First chunks, later chunks, one token, nothing new, several blocks of queries."""
    q_lens, ctx_lens = [1, 5, 0, 40], [1, 70, 9, 40]
    batch = make_paged(
        ctx_lens, layout=layout, page_size=page_size, dtype=dtype, num_kv_heads=1, head_dim=32
    )
    k_pages, v_pages, table = moved(batch)
    q = rand(sum(q_lens), 5, 32, dtype=dtype)[:, :3]
    bounds = int32(0, 1, 6, 6, 46)
    arguments = (q, k_pages, v_pages, bounds, *table, 0.125)
    out = pd_kernels.prefill_attention(*arguments)
    assert_close(out, pd_kernels.prefill_attention_reference(*arguments))


@DTYPES
@HEADS
def test_prefill_attention_of_other_head_shapes(
    make_paged: Callable[..., Any],
    assert_close: Close,
    hq: int,
    hk: int,
    d: int,
    dtype: torch.dtype,
) -> None:
    batch = make_paged(
        [40], layout="page_first", page_size=4, dtype=dtype, num_kv_heads=hk, head_dim=d
    )
    k_pages, v_pages, table = moved(batch)
    q = rand(20, hq, d, dtype=dtype)
    arguments = (q, k_pages, v_pages, int32(0, 20), *table, 0.3)
    out = pd_kernels.prefill_attention(*arguments)
    assert_close(out, pd_kernels.prefill_attention_reference(*arguments))


def test_prefill_attention_of_several_blocks(
    make_paged: Callable[..., Any], assert_close: Close
) -> None:
    batch = make_paged(
        [140, 131],
        layout="page_first",
        page_size=4,
        dtype=torch.bfloat16,
        num_kv_heads=1,
        head_dim=16,
    )
    k_pages, v_pages, table = moved(batch)
    q = rand(140 + 130, 1, 16, dtype=torch.bfloat16)
    arguments = (q, k_pages, v_pages, int32(0, 140, 270), *table, 0.3)
    out = pd_kernels.prefill_attention(*arguments)
    assert_close(out, pd_kernels.prefill_attention_reference(*arguments))


def test_an_empty_batch_computes_nothing(make_paged: Callable[..., Any]) -> None:
    batch = make_paged([], layout="page_first", page_size=16, dtype=torch.float32)
    k_pages, v_pages, table = moved(batch)
    q = rand(0, 9, 64, dtype=torch.float32)
    out = pd_kernels.decode_attention(q, k_pages, v_pages, *table, 0.125)
    assert out.shape == (0, 9, 64)
    out = pd_kernels.prefill_attention(q, k_pages, v_pages, int32(0), *table, 0.125)
    assert out.shape == (0, 9, 64)


def test_large_scores_do_not_overflow(make_paged: Callable[..., Any]) -> None:
    batch = make_paged([50], layout="page_first", page_size=1, dtype=torch.float32, num_kv_heads=1)
    k_pages, v_pages, table = moved(batch)
    q = rand(50, 1, 64, dtype=torch.float32, scale=100.0)
    arguments = (q, k_pages, v_pages, int32(0, 50), *table, 1.0)
    out, expected = (
        pd_kernels.prefill_attention(*arguments),
        pd_kernels.prefill_attention_reference(*arguments),
    )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
