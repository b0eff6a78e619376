"""What the kernels' launches share."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's own switch: its interpreter multiplies bfloat16 operands as if they were integers.
INTERPRETED = bool(triton.knobs.runtime.interpret)

# What a GPU has where there is none to ask: under the interpreter.
_INTERPRETED_MULTIPROCESSORS = 4


@triton.jit
def product(left, right, WIDE: tl.constexpr):
    """The matrix product, summed in float32; float32 operands are not cut to tf32."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


def padded(size: int, least: int = 1) -> int:
    """The next power of two: the size of a block that holds `size` elements."""
    return max(least, 1 << max(0, size - 1).bit_length())


def multiprocessors(tensor: Tensor) -> int:
    """How many programs of `tensor`'s device run at a time, at least."""
    if not tensor.is_cuda:
        return _INTERPRETED_MULTIPROCESSORS
    return _multiprocessors(tensor.device.index or 0)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
