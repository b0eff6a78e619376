"""The operations that flashinfer has in the form that ours take: norms, the gate, rope.

Only in half precision and for rows of whole vectors; what it does not take goes to Triton. Its
attention wants a plan that the host makes of a batch's page table, its page append three more index
tensors: there Triton's kernels are used with flashinfer installed too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pd_kernels.packages import package, triton_kernel
from pd_kernels.registry import BackendUnavailable

_DTYPES = (torch.bfloat16, torch.float16)
_VECTOR_BYTES = 16
# Of a head, what its rope kernel is compiled for.
_ROPE_DIMS = (64, 128, 256)


def rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    flashinfer, otherwise = _working(), triton_kernel("rms_norm")()

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes(x):
            return otherwise(x, weight, eps)  # type: ignore[no-any-return]
        return flashinfer.norm.rmsnorm(x, weight, eps)  # type: ignore[no-any-return]

    return rms_norm


def fused_add_rms_norm() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    flashinfer, otherwise = _working(), triton_kernel("rms_norm", "fused_add_rms_norm")()

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes(x):
            return otherwise(x, residual, weight, eps)  # type: ignore[no-any-return]
        out = x.clone()  # which it overwrites
        flashinfer.norm.fused_add_rmsnorm(out, residual, weight, eps)
        return out

    return fused_add_rms_norm


def silu_and_mul() -> Callable[[Tensor], Tensor]:
    flashinfer, otherwise = _working(), triton_kernel("silu_and_mul")()

    def silu_and_mul(x: Tensor) -> Tensor:
        if not _takes(x) or not x.is_contiguous() or x.shape[1] // 2 * x.itemsize % _VECTOR_BYTES:
            return otherwise(x)  # type: ignore[no-any-return]
        return flashinfer.activation.silu_and_mul(x)  # type: ignore[no-any-return]

    return silu_and_mul


def rope() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    flashinfer, otherwise = _working(), triton_kernel("rope")()

    def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        dim = q.shape[2]
        if not _takes(q) or dim not in _ROPE_DIMS:
            otherwise(q, k, positions, cos_sin)
            return
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), dim, cos_sin, is_neox=True
        )

    return rope


def _takes(x: Tensor) -> bool:
    return x.dtype in _DTYPES and x.numel() > 0 and x.stride(0) * x.itemsize % _VECTOR_BYTES == 0


@cache
def _working() -> Any:
    """flashinfer, seen to run: it compiles its kernels at their first use, for which it needs
    nvcc. Raises `BackendUnavailable`."""
    flashinfer = package("flashinfer")
    try:
        x = torch.ones(1, 64, dtype=torch.bfloat16, device="cuda")
        flashinfer.norm.rmsnorm(x, x[0], 1e-6)
    except Exception as error:  # of its compiler, of CUDA, of what it depends on
        raise BackendUnavailable(f"flashinfer does not run here: {error}") from error
    return flashinfer
