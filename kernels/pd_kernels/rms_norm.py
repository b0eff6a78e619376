"""Root mean square norm (Zhang and Sennrich, 2019), alone and fused with the residual addition."""

from __future__ import annotations

from torch import Tensor

from pd_kernels.registry import Op


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The rounding steps are those of Hugging Face's Llama, so float32 results are its own."""
    wide = x.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * wide.to(x.dtype)


def fused_add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


RMS_NORM = Op("rms_norm", rms_norm_reference)
FUSED_ADD_RMS_NORM = Op("fused_add_rms_norm", fused_add_rms_norm_reference)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    `x` is [N, H] float32 or bfloat16, `weight` is [H] of the same dtype. Returns a new [N, H].
    """
    return RMS_NORM.on(x.device.type)(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place, then returns `rms_norm(residual, weight, eps)`.

    The sum is rounded to the dtype before the norm, as a separate addition would do.
    """
    return FUSED_ADD_RMS_NORM.on(x.device.type)(x, residual, weight, eps)
