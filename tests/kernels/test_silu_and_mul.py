from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pd_kernels import silu_and_mul, silu_and_mul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(0, 1536), (1, 1536), (9, 1536), (33, 40), (2, 7)])
def test_silu_and_mul_matches_reference(
    tokens: int, width: int, dtype: torch.dtype, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(tokens, 2 * width, generator=generator) * 4).to(dtype)
    assert_close(silu_and_mul(x), silu_and_mul_reference(x))


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[0.5, -3.0, 2.0, 4.0]])
    gate, up = x[:, :2], x[:, 2:]
    torch.testing.assert_close(silu_and_mul_reference(x), gate / (1 + torch.exp(-gate)) * up)


def test_extreme_gates_saturate() -> None:
    x = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(
        silu_and_mul(x), torch.tensor([[0.0, 0.0, 90.0, 1e4]]), rtol=0, atol=1e-30
    )
