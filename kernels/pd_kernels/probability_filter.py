"""Which tokens may be drawn: min_p, top_k and top_p, one after another, of each row by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd_kernels import flashinfer_kernels
from pd_kernels.packages import triton_kernel
from pd_kernels.registry import Op

_Filter = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def filter_probabilities_reference(
    weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    least = min_p[:, None] * weights.amax(1, keepdim=True)
    weights = weights.where(weights >= least, 0)
    # Stable, so that of equal weights the lower ids stay.
    largest, ids = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    largest = largest.where(rank < top_k[:, None], 0)
    cumulated = largest.cumsum(1, dtype=torch.float64)
    # A token stays while those before it have not filled the nucleus yet.
    full = cumulated - largest >= top_p[:, None] * cumulated[:, -1:]
    full[:, 0] = False
    return torch.zeros_like(weights).scatter_(1, ids, largest.masked_fill_(full, 0))


FILTER_PROBABILITIES: Op[_Filter] = Op(
    "filter_probabilities",
    filter_probabilities_reference,
    {
        "triton": triton_kernel("probability_filter", "filter_probabilities"),
        "flashinfer": flashinfer_kernels.filter_probabilities,
    },
)


def filter_probabilities(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights of the tokens that may be drawn, all others zero: a new [B, V], not renormalised.

    `weights` is [B, V] float32, probabilities times any factor. `min_p` is [B] float32, `top_k` [B]
    int32, `top_p` [B] float64. First goes what is less likely than `min_p` times the likeliest;
    of the rest the `top_k` likeliest stay, and of them the likeliest that fill `top_p` of what they
    sum up to, at least one. Of equal weights the lower ids stay. 0, V and 1 filter nothing out.
    """
    return FILTER_PROBABILITIES.of(weights)(weights, min_p, top_k, top_p)
