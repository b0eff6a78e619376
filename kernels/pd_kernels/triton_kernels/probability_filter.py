from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.triton_kernels.launch import padded

_BLOCK = 8192


@triton.jit
def _bits(row, at, vocab, least, BLOCK: tl.constexpr):
    """The weights of a block, those below `least` zero, and their bits: of floats that are not
    negative, they are in the floats' order."""
    token = at + tl.arange(0, BLOCK)
    weight = tl.load(row + token, mask=token < vocab, other=0.0)
    weight = tl.where(weight >= least, weight, 0.0)
    return weight, weight.to(tl.int32, bitcast=True), token


@triton.jit
def _kernel(weights, min_p, top_k, top_p, out, vocab, BLOCK: tl.constexpr):
    """One row, which is read once for every bit of a bound that is looked for."""
    row = weights + tl.program_id(0).to(tl.int64) * vocab
    largest = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocab, BLOCK):
        weight, _, _ = _bits(row, at, vocab, 0.0, BLOCK)
        largest = tl.maximum(largest, weight)
    least = tl.load(min_p + tl.program_id(0)) * tl.max(largest, axis=0)

    # The largest bound that as many weights reach as are to stay: the last of them.
    k = tl.load(top_k + tl.program_id(0))
    kth = tl.zeros([], tl.int32)
    if k < vocab:
        for step in range(31):
            bound = kth | (1 << (30 - step))
            reached = tl.zeros([BLOCK], tl.int32)
            for at in range(0, vocab, BLOCK):
                _, bits, _ = _bits(row, at, vocab, least, BLOCK)
                reached += (bits >= bound).to(tl.int32)
            kth = tl.where(tl.sum(reached, axis=0) >= k, bound, kth)
    above, count = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        weight, bits, _ = _bits(row, at, vocab, least, BLOCK)
        above += tl.where(bits > kth, weight, 0.0).to(tl.float64)
        count += (bits > kth).to(tl.int32)
    # So many of those that are equal to the last.
    equals = k - tl.sum(count, axis=0)
    equal = equals.to(tl.float64) * kth.to(tl.float32, bitcast=True).to(tl.float64)

    # The largest bound above which there is the nucleus: what is larger than the bound stays.
    nucleus = tl.load(top_p + tl.program_id(0))
    last = kth
    if nucleus < 1.0:
        target = nucleus * (tl.sum(above, axis=0) + equal)
        bound = tl.zeros([], tl.int32)
        for step in range(31):
            tried = bound | (1 << (30 - step))
            filled = tl.zeros([BLOCK], tl.float64)
            for at in range(0, vocab, BLOCK):
                weight, bits, _ = _bits(row, at, vocab, least, BLOCK)
                filled += tl.where(bits > tl.maximum(tried, kth), weight, 0.0).to(tl.float64)
            sum_above = tl.sum(filled, axis=0) + tl.where(tried < kth, equal, 0.0)
            bound = tl.where(sum_above >= target, tried, bound)
        smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for at in range(0, vocab, BLOCK):
            _, bits, _ = _bits(row, at, vocab, least, BLOCK)
            inside = (bits > bound) & (bits >= kth)
            smallest = tl.minimum(smallest, tl.where(inside, bits, 0x7FFFFFFF))
        last = tl.min(smallest, axis=0)
        filled = tl.zeros([BLOCK], tl.float64)
        for at in range(0, vocab, BLOCK):
            weight, bits, _ = _bits(row, at, vocab, least, BLOCK)
            filled += tl.where(bits > last, weight, 0.0).to(tl.float64)
        value = last.to(tl.float32, bitcast=True).to(tl.float64)
        missing = tl.maximum(target - tl.sum(filled, axis=0), 0.0)
        # Less than all that were left would fill, so never more of them than were.
        equals = tl.ceil(missing / tl.where(value > 0, value, 1.0)).to(tl.int32)
        equals = tl.maximum(equals, 1)

    before = tl.zeros([], tl.int32)
    for at in range(0, vocab, BLOCK):
        weight, bits, token = _bits(row, at, vocab, least, BLOCK)
        is_last = ((bits == last) & (token < vocab)).to(tl.int32)
        rank = before + tl.cumsum(is_last, axis=0) - is_last
        stays = (bits > last) | ((bits == last) & (rank < equals))
        target_at = out + tl.program_id(0).to(tl.int64) * vocab + token
        tl.store(target_at, tl.where(stays, weight, 0.0), mask=token < vocab)
        before += tl.sum(is_last, axis=0)


def filter_probabilities(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    weights = weights.contiguous()
    rows, vocab = weights.shape
    out = torch.empty_like(weights)
    if rows:
        block = min(_BLOCK, padded(vocab, 16))
        _kernel[(rows,)](
            weights, min_p, top_k, top_p, out, vocab, BLOCK=block, num_warps=min(16, block // 16)
        )
    return out
