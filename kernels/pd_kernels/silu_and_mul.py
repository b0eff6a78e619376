"""The gate of a Llama feed-forward block (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_kernels import flashinfer_kernels, native
from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_SiluAndMul = Callable[[Tensor], Tensor]


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _compiled() -> _SiluAndMul:
    kernels = native.by_dtype("silu_and_mul", "pqp qq i")

    def silu_and_mul(x: Tensor) -> Tensor:
        kernel = kernels.get(x.dtype)
        if kernel is None:
            return silu_and_mul_reference(x)
        n, both = x.shape
        if both % 2 or x.stride(1) != 1:
            raise ValueError("x's rows must be contiguous and of even length")
        out = x.new_empty(n, both // 2)
        kernel(x.data_ptr(), x.stride(0), out.data_ptr(), n, both // 2, torch.get_num_threads())
        return out

    return silu_and_mul


SILU_AND_MUL: Op[_SiluAndMul] = Op(
    "silu_and_mul",
    silu_and_mul_reference,
    {
        "cpu": _compiled,
        "triton": triton_kernel("silu_and_mul"),
        "flashinfer": flashinfer_kernels.silu_and_mul,
    },
)


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up`, with `x` = [gate, up]: [N, 2 I] to a new [N, I], float32 or bfloat16."""
    return SILU_AND_MUL.of(x)(x)
