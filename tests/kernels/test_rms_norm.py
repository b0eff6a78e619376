from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pd_kernels import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize("shape", [(0, 576), (1, 576), (7, 576), (33, 100), (3, 7)])
Close = Callable[[Tensor, Tensor], None]


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    residual = torch.randn(shape, generator=generator).to(dtype)
    weight = (1 + torch.randn(shape[1], generator=generator) / 4).to(dtype)
    return x, residual, weight


@DTYPES
def test_reference_is_transformers_llama_norm_bit_for_bit(dtype: torch.dtype) -> None:
    x, _, weight = inputs((7, 576), dtype)
    theirs = LlamaRMSNorm(576, eps=EPS)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(rms_norm_reference(x, weight, EPS), theirs(x))


@DTYPES
@SHAPES
def test_rms_norm_matches_reference(
    shape: tuple[int, int], dtype: torch.dtype, assert_close: Close
) -> None:
    x, _, weight = inputs(shape, dtype)
    before = x.clone()
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    assert torch.equal(x, before)


@DTYPES
@SHAPES
def test_fused_add_rms_norm_matches_reference(
    shape: tuple[int, int], dtype: torch.dtype, assert_close: Close
) -> None:
    x, residual, weight = inputs(shape, dtype)
    expected_residual = residual.clone()
    expected = fused_add_rms_norm_reference(x, expected_residual, weight, EPS)
    before = x.clone()
    assert_close(fused_add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)


def test_fused_add_is_addition_then_norm() -> None:
    x, residual, weight = inputs((5, 576), torch.bfloat16)
    total = x + residual
    out = fused_add_rms_norm_reference(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm_reference(total, weight, EPS))


def test_rows_may_be_strided(assert_close: Close) -> None:
    x, _, weight = inputs((6, 576), torch.float32)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1)[:, :576]
    assert_close(rms_norm(wide, weight, EPS), rms_norm_reference(x, weight, EPS))
