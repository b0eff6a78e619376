from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton_kernels.launch import padded

_BLOCK = 4096


@triton.jit
def _kernel(
    pool,
    packed,
    pages,
    page_stride,
    layer_stride,
    kv_stride,
    length,
    blocks,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece of the keys or values of one page and layer, `length` elements without a gap."""
    index = tl.program_id(0) // blocks
    # Layer-first, a layer may begin beyond what 32 bits count.
    layer, kv = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    element = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = element < length
    page = tl.load(pages + index).to(tl.int64)
    in_pool = pool + page * page_stride + layer * layer_stride + kv * kv_stride + element
    block = (index.to(tl.int64) * tl.num_programs(1) + layer) * 2 + kv
    in_packed = packed + block * length + element
    if SCATTER:
        tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)


def page_gather(pool: Tensor, pages: Tensor) -> Tensor:
    packed = pool.new_empty((pages.shape[0], *pool.shape[1:]))
    _launch(pool, pages, packed, scatter=False)
    return packed


def page_scatter(pool: Tensor, pages: Tensor, packed: Tensor) -> None:
    _launch(pool, pages, packed, scatter=True)


def _launch(pool: Tensor, pages: Tensor, packed: Tensor, *, scatter: bool) -> None:
    layers, length = pool.shape[1], pool[0, 0, 0].numel()
    if not pool[0, 0, 0].is_contiguous() or not packed.is_contiguous():
        raise ValueError("a page's keys of one layer, and the packed pages, must be contiguous")
    if pages.shape[0]:
        block = min(_BLOCK, padded(length))
        blocks = triton.cdiv(length, block)
        _kernel[(pages.shape[0] * blocks, layers, 2)](
            pool,
            packed,
            pages,
            *(pool.stride(each) for each in range(3)),
            length,
            blocks,
            SCATTER=scatter,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
