"""Rotary position embedding (Su et al., 2021), the "neox" form that rotates halves of a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import flashinfer_kernels, native
from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_Rope = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32.

    Raises ValueError for an odd `head_dim`.
    """
    if head_dim % 2:
        raise ValueError(f"rope needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def rope_cos_sin(frequencies: Tensor, max_positions: int) -> Tensor:
    """The table for `rope`: [max_positions, 2 * len(frequencies)] float32, cosines in the first
    half, sines in the second. `frequencies` are `rope_frequencies`, or scaled ones.
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        first, second = heads.float().chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads.copy_(rotated)


def _compiled() -> _Rope:
    kernels = native.by_dtype("rope", "pqpq pp qqqqq i")

    def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        kernel = kernels.get(q.dtype)
        if kernel is None:
            return rope_reference(q, k, positions, cos_sin)
        n, q_heads, dim = q.shape
        k_heads = k.shape[1]
        if k.dtype is not q.dtype or k.shape != (n, k_heads, dim):
            raise ValueError("k must have q's dtype, tokens and head_dim")
        if q.stride()[1:] != (dim, 1) or k.stride()[1:] != (dim, 1):
            raise ValueError("the heads of a token must lie side by side")
        if positions.dtype is not torch.int64 or positions.shape != (n,):
            raise ValueError(f"positions must be {n} int64")
        if cos_sin.dtype is not torch.float32 or cos_sin.stride() != (dim, 1):
            raise ValueError(f"cos_sin must be contiguous [positions, {dim}] float32")
        if kernel(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            n,
            q_heads,
            k_heads,
            dim,
            cos_sin.shape[0],
            torch.get_num_threads(),
        ):
            raise IndexError(f"a position is outside of cos_sin's {cos_sin.shape[0]}")
        return None

    return rope


ROPE: Op[_Rope] = Op(
    "rope",
    rope_reference,
    {"cpu": _compiled, "triton": triton_kernel("rope"), "flashinfer": flashinfer_kernels.rope},
)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates `q` and `k` in place by their positions, computed in float32.

    `q` is [N, Hq, D] and `k` is [N, Hk, D], float32 or bfloat16; both may be slices of one fused
    [N, (Hq + 2 Hk) * D] tensor, as long as a token's heads lie side by side. `positions` is [N]
    int64, each below the length of `cos_sin`, which `rope_cos_sin` builds.
    Raises IndexError for a position outside of the table.
    """
    ROPE.of(q)(q, k, positions, cos_sin)
