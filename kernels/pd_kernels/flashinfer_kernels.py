"""flashinfer's norms, gate, rope and filters of probabilities, which take what our ops take.

Only in half precision and for rows of whole vectors; what it does not take goes to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pd_kernels.packages import package, triton_kernel
from pd_kernels.registry import BackendUnavailable

DTYPES = (torch.bfloat16, torch.float16)
_VECTOR_BYTES = 16
# Of a head, what its rope kernel is compiled for.
_ROPE_DIMS = (64, 128, 256)


def rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    flashinfer, otherwise = working(), triton_kernel("rms_norm")()

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes(x):
            return otherwise(x, weight, eps)  # type: ignore[no-any-return]
        return flashinfer.norm.rmsnorm(x, weight, eps)  # type: ignore[no-any-return]

    return rms_norm


def fused_add_rms_norm() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    flashinfer, otherwise = working(), triton_kernel("rms_norm", "fused_add_rms_norm")()

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes(x):
            return otherwise(x, residual, weight, eps)  # type: ignore[no-any-return]
        out = x.clone()  # which it overwrites
        flashinfer.norm.fused_add_rmsnorm(out, residual, weight, eps)
        return out

    return fused_add_rms_norm


def silu_and_mul() -> Callable[[Tensor], Tensor]:
    flashinfer, otherwise = working(), triton_kernel("silu_and_mul")()

    def silu_and_mul(x: Tensor) -> Tensor:
        if not _takes(x) or not x.is_contiguous() or x.shape[1] // 2 * x.itemsize % _VECTOR_BYTES:
            return otherwise(x)  # type: ignore[no-any-return]
        return flashinfer.activation.silu_and_mul(x)  # type: ignore[no-any-return]

    return silu_and_mul


def rope() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    flashinfer, otherwise = working(), triton_kernel("rope")()

    def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        dim = q.shape[2]
        if not _takes(q) or dim not in _ROPE_DIMS:
            otherwise(q, k, positions, cos_sin)
            return
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), dim, cos_sin, is_neox=True
        )

    return rope


def filter_probabilities() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A row's result depends on neither the other rows nor the order of atomic additions: of what
    flashinfer gives, only which weights are not zero is used, and other sums are in float64."""
    sampling = working().sampling

    def filter_probabilities(
        weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        least = min_p[:, None] * weights.amax(1, keepdim=True)
        weights = weights.where(weights >= least, 0)
        kept = weights.where(sampling.top_k_renorm_probs(weights, top_k) > 0, 0)
        last, larger = _split(kept)
        kept = _first_equals(kept, last, top_k - (larger > 0).sum(1))
        total = kept.sum(1, dtype=torch.float64)
        nucleus = sampling.top_p_renorm_probs((kept / total[:, None]).float(), top_p.float())
        kept = kept.where((nucleus > 0) | (top_p >= 1)[:, None], 0)
        last, larger = _split(kept)
        missing = top_p * total - larger.sum(1, dtype=torch.float64)
        wanted = (missing / last).ceil().clamp_min(1)
        return _first_equals(kept, last, wanted.where(top_p < 1, kept.shape[1]))

    return filter_probabilities


def _split(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest of each row's weights that are not zero, and the row without those."""
    last = kept.where(kept > 0, torch.inf).amin(1)
    return last, kept.where(kept > last[:, None], 0)


def _first_equals(kept: Tensor, last: Tensor, wanted: Tensor) -> Tensor:
    """Of the weights equal to `last`, only as many as are wanted: flashinfer keeps all or none."""
    equal = kept == last[:, None]
    return kept.where(~equal | (equal.cumsum(1) <= wanted[:, None]), 0)


def _takes(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.numel() > 0 and x.stride(0) * x.itemsize % _VECTOR_BYTES == 0


@cache
def working() -> Any:
    """flashinfer, seen to run: it compiles its kernels at their first use, for which it needs
    nvcc. Raises `BackendUnavailable`."""
    flashinfer = package("flashinfer")
    try:
        x = torch.ones(1, 64, dtype=torch.bfloat16, device="cuda")
        flashinfer.norm.rmsnorm(x, x[0], 1e-6)
    except Exception as error:  # of its compiler, of CUDA, of what it depends on
        raise BackendUnavailable(f"flashinfer does not run here: {error}") from error
    return flashinfer
