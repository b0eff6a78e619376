from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pd_kernels import PackedLinear, linear_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_matches_reference(
    tokens: int, bias: bool, dtype: torch.dtype, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    generator = torch.Generator().manual_seed(8)
    weight = (torch.randn(960, 576, generator=generator) / 24).to(dtype)
    offset = torch.randn(960, generator=generator).to(dtype) if bias else None
    x = torch.randn(tokens, 576, generator=generator).to(dtype)
    linear = PackedLinear(weight, offset)
    out = linear(x)
    assert out.shape == (tokens, linear.out_features)
    assert_close(out, linear_reference(x, weight, offset))


def test_reference_is_the_product() -> None:
    weight, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    assert linear_reference(x, weight, torch.tensor([0.5, 0.0])).tolist() == [[17.5, 39.0]]
