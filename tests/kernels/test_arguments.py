"""What the compiled kernels refuse instead of reading or writing memory that is not theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pd_kernels
from pd_kernels import (
    decode_attention,
    fused_add_rms_norm,
    page_write,
    prefill_attention,
    rms_norm,
    rope,
    rope_cos_sin,
    rope_frequencies,
    silu_and_mul,
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if pd_kernels.backend_name("cpu") != "cpu":
        pytest.skip("there is no compiled backend on this machine")


def test_norms_refuse_weights_and_residuals_that_do_not_fit() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight must be 8"):
        rms_norm(x, torch.ones(9), 0.1)
    with pytest.raises(ValueError, match="weight must be 8"):
        rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 0.1)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        rms_norm(torch.zeros(8, 2).T, torch.ones(8), 0.1)
    with pytest.raises(ValueError, match="residual must have"):
        fused_add_rms_norm(x, torch.zeros(3, 8), torch.ones(8), 0.1)


def test_silu_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="even length"):
        silu_and_mul(torch.zeros(2, 7))


@pytest.mark.parametrize("position", [-1, 10])
def test_rope_refuses_positions_outside_of_the_table(position: int) -> None:
    q, k = torch.ones(2, 2, 16), torch.ones(2, 1, 16)
    with pytest.raises(IndexError, match="outside of cos_sin's 10"):
        rope(q, k, torch.tensor([3, position]), rope_cos_sin(rope_frequencies(16, 1e4), 10))
    assert q.eq(1).all()


def test_rope_refuses_other_dtypes_and_shapes() -> None:
    q, k, table = (
        torch.ones(2, 2, 16),
        torch.ones(2, 1, 16),
        rope_cos_sin(rope_frequencies(16, 1e4), 10),
    )
    with pytest.raises(ValueError, match="2 int64"):
        rope(q, k, torch.tensor([1, 2], dtype=torch.int32), table)
    with pytest.raises(ValueError, match="2 int64"):
        rope(q, k, torch.tensor([1]), table)
    with pytest.raises(ValueError, match="float32"):
        rope(q, k, torch.tensor([1, 2]), table.bfloat16())
    with pytest.raises(ValueError, match="side by side"):
        rope(q.transpose(0, 1), k, torch.tensor([1, 2]), table)


@pytest.mark.parametrize("slot", [-1, 12])
def test_page_write_refuses_slots_outside_of_the_pages(slot: int) -> None:
    pages = torch.zeros(3, 4, 1, 16)
    k = torch.ones(2, 1, 16)
    with pytest.raises(IndexError, match="3 pages of 4 tokens"):
        page_write(k, k, pages, pages.clone(), torch.tensor([0, slot]))
    assert not pages.any()


def test_page_write_refuses_mixed_dtypes_and_shapes() -> None:
    pages, k, slots = torch.zeros(3, 4, 1, 16), torch.ones(2, 1, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="one dtype"):
        page_write(k.bfloat16(), k.bfloat16(), pages, pages, slots)
    with pytest.raises(ValueError, match="one shape"):
        page_write(k, k[:1], pages, pages, slots)
    with pytest.raises(ValueError, match="2 contiguous int64"):
        page_write(k, k, pages, pages, slots.int())


@pytest.mark.parametrize("broken", ["page", "negative", "context", "indptr"])
def test_attention_refuses_tables_that_leave_the_pages(
    make_paged: Callable[..., Any], broken: str
) -> None:
    batch = make_paged([5, 9], layout="page_first", page_size=4, dtype=torch.float32)
    if broken == "page":
        batch.kv_indices[1] = batch.k_pages.shape[0]
    elif broken == "negative":
        batch.kv_indices[1] = -1
    elif broken == "context":
        batch.ctx_lens[0] = 9
    else:
        batch.kv_indptr[2] += 1
    q, q_indptr = torch.zeros(2, 9, 64), torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(IndexError, match="page table"):
        decode_attention(q, batch.k_pages, batch.v_pages, *batch.table, 1.0)
    with pytest.raises(IndexError, match="page table"):
        prefill_attention(q, batch.k_pages, batch.v_pages, q_indptr, *batch.table, 1.0)


@pytest.mark.parametrize("bounds", [[0, 1, 3], [1, 1, 2], [0, 2, 1], [0, 6, 7]])
def test_prefill_refuses_query_bounds_that_do_not_fit(
    make_paged: Callable[..., Any], bounds: list[int]
) -> None:
    batch = make_paged([5, 9], layout="page_first", page_size=4, dtype=torch.float32)
    q = torch.zeros(7 if bounds[1] == 6 else 2, 9, 64)
    q_indptr = torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(IndexError, match="q_indptr does not fit"):
        prefill_attention(q, batch.k_pages, batch.v_pages, q_indptr, *batch.table, 1.0)


def test_attention_refuses_what_does_not_go_together(make_paged: Callable[..., Any]) -> None:
    batch = make_paged([5], layout="page_first", page_size=4, dtype=torch.float32)
    q = torch.zeros(1, 9, 64)
    k, v, (indptr, indices, lens) = batch.k_pages, batch.v_pages, batch.table
    with pytest.raises(ValueError, match="one dtype"):
        decode_attention(q.bfloat16(), k, v, *batch.table, 1.0)
    with pytest.raises(ValueError, match="do not go with pages"):
        decode_attention(q[:, :8].contiguous(), k, v, *batch.table, 1.0)
    with pytest.raises(ValueError, match="same shape and strides"):
        decode_attention(q, k, v.contiguous(), *batch.table, 1.0)
    with pytest.raises(ValueError, match="must be contiguous"):
        decode_attention(torch.zeros(1, 64, 9).transpose(1, 2), k, v, *batch.table, 1.0)
    with pytest.raises(ValueError, match="contiguous int32"):
        decode_attention(q, k, v, indptr, indices.long(), lens, 1.0)
    with pytest.raises(ValueError, match="batch of 1"):
        decode_attention(q, k, v, indptr, indices, lens[:0], 1.0)
