"""The gate of a Llama feed-forward block (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pd_kernels.registry import Op


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


SILU_AND_MUL = Op("silu_and_mul", silu_and_mul_reference)


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up`, with `x` = [gate, up]: [N, 2 I] to a new [N, I], float32 or bfloat16."""
    return SILU_AND_MUL.on(x.device.type)(x)
