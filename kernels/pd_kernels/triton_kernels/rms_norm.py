from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton_kernels.launch import padded


@triton.jit
def _kernel(
    x,
    residual,
    weight,
    out,
    width,
    row_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * row_stride + column, mask=inside, other=0.0)
    dtype = values.dtype
    wide = values.to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        total = (wide + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, total, mask=inside)
        wide = total.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the product, as the reference does.
    result = scaled.to(dtype).to(tl.float32) * weights
    tl.store(out + row * width + column, result.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    n, width = x.shape
    out = torch.empty((n, width), dtype=x.dtype, device=x.device)
    if n:
        block = padded(width)
        _kernel[(n,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out
