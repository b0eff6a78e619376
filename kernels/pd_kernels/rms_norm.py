"""Root mean square norm (Zhang and Sennrich, 2019), alone and fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import flashinfer_kernels, native
from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_Norm = Callable[[Tensor, Tensor, float], Tensor]
_FusedNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The rounding steps are those of Hugging Face's Llama, so float32 results are its own."""
    wide = x.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * wide.to(x.dtype)


def fused_add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


def _compiled() -> _Norm:
    kernels = native.by_dtype("rms_norm", "pqpp qqf i")

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernel = kernels.get(x.dtype)
        if kernel is None:
            return rms_norm_reference(x, weight, eps)
        n, width = x.shape
        _check(x, weight, width)
        out = torch.empty_like(x)
        kernel(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            n,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    return rms_norm


def _compiled_fused_add() -> _FusedNorm:
    kernels = native.by_dtype("fused_add_rms_norm", "pqpqpp qqf i")

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernel = kernels.get(x.dtype)
        if kernel is None:
            return fused_add_rms_norm_reference(x, residual, weight, eps)
        n, width = x.shape
        _check(x, weight, width)
        if residual.dtype is not x.dtype or residual.shape != x.shape or residual.stride(1) != 1:
            raise ValueError("residual must have x's dtype and shape, its rows contiguous")
        out = torch.empty_like(x)
        kernel(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            n,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    return fused_add_rms_norm


def _check(x: Tensor, weight: Tensor, width: int) -> None:
    if x.stride(1) != 1:
        raise ValueError("x's rows must be contiguous")
    if weight.dtype is not x.dtype or weight.numel() != width or weight.stride(0) != 1:
        raise ValueError(f"weight must be {width} contiguous elements of {x.dtype}")


RMS_NORM: Op[_Norm] = Op(
    "rms_norm",
    rms_norm_reference,
    {
        "cpu": _compiled,
        "triton": triton_kernel("rms_norm"),
        "flashinfer": flashinfer_kernels.rms_norm,
    },
)
FUSED_ADD_RMS_NORM: Op[_FusedNorm] = Op(
    "fused_add_rms_norm",
    fused_add_rms_norm_reference,
    {
        "cpu": _compiled_fused_add,
        "triton": triton_kernel("rms_norm", "fused_add_rms_norm"),
        "flashinfer": flashinfer_kernels.fused_add_rms_norm,
    },
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    `x` is [N, H] float32 or bfloat16, `weight` is [H] of the same dtype. Returns a new [N, H].
    """
    return RMS_NORM.of(x)(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place, then returns `rms_norm(residual, weight, eps)`.

    The sum is rounded to the dtype before the norm, as a separate addition would do.
    """
    return FUSED_ADD_RMS_NORM.of(x)(x, residual, weight, eps)
