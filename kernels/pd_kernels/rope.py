"""Rotary position embedding (Su et al., 2021), the "neox" form that rotates halves of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.registry import Op


def rope_cos_sin(head_dim: int, max_positions: int, theta: float) -> Tensor:
    """The table for `rope`: [max_positions, head_dim] float32, cosines in the first half, sines in
    the second.

    Raises ValueError for an odd `head_dim`.
    """
    if head_dim % 2:
        raise ValueError(f"rope needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        first, second = heads.float().chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads.copy_(rotated)


ROPE = Op("rope", rope_reference)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates `q` and `k` in place by their positions, computed in float32.

    `q` is [N, Hq, D] and `k` is [N, Hk, D], float32 or bfloat16; both may be slices of one fused
    [N, (Hq + 2 Hk) * D] tensor, as long as a token's heads lie side by side. `positions` is [N]
    int64, each below the length of `cos_sin`, which `rope_cos_sin` builds.
    """
    ROPE.on(q.device.type)(q, k, positions, cos_sin)
