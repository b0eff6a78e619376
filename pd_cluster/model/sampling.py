"""Choosing the next token of each sequence.

A draw depends on nothing but the logits, the parameters and (seed, sequence, position): the same
token comes whatever else is in the batch and whichever worker draws. So a sequence goes on exactly
where another worker left it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pd_cluster.types import SamplingParams

# How many of the largest weights are looked at for a nucleus, before all: it is seldom wide, and a
# sort of the whole vocabulary costs many times the rest.
_NUCLEUS_GUESSES = (256, 4096)

_SEED_MASK = (1 << 64) - 1


@torch.inference_mode()
def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    sequence: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """One token id for each row of `logits` [B, vocab] float32.

    `sequence` numbers a request's sequences, `positions` are those of the tokens to choose. At
    temperature 0 the largest logit wins, the lowest id of equals. Otherwise the temperature is
    applied first, then min_p, top_k and top_p filter, each what the one before has left (as in
    vLLM): top_p is of the renormalised rest.
    """
    greedy = [each.temperature == 0 for each in params]
    tokens: list[int] = logits.argmax(-1).tolist() if any(greedy) else [0] * len(params)
    for row, each in enumerate(params):
        if not greedy[row]:
            # Row by row: nothing of the others can reach it, and its weights stay in the cache.
            tokens[row] = _draw(
                logits[row], each, uniform(each.seed, sequence[row], positions[row])
            )
    return tokens


def uniform(seed: int, sequence: int, position: int) -> float:
    """A number in [0, 1 - 2^-48] that belongs to this key (Philox 4x64, Salmon et al., 2011)."""
    key = np.array([seed & _SEED_MASK, sequence], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position).random_raw()
    # 48 bits: times a sum of weights it stays below the sum after rounding.
    return int(bits >> 16) * 2.0**-48


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` of the cumulated distribution."""
    weights = (logits - logits.max()).div_(params.temperature).exp_()
    if params.min_p == 0:
        return _pick(weights, params, uniform)
    # The largest weight is 1, so these are ratios to the likeliest token's probability.
    ids = (weights >= params.min_p).nonzero()[:, 0]
    return int(ids[_pick(weights[ids], params, uniform)])


def _pick(weights: Tensor, params: SamplingParams, uniform: float) -> int:
    if params.top_p >= 1 and not 0 < params.top_k < weights.shape[0]:
        return _at(weights, uniform)
    kept, ids = _filter(weights, params.top_k, params.top_p)
    return int(ids[_at(kept, uniform)])


def _at(weights: Tensor, uniform: float) -> int:
    cumulated = weights.cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(cumulated, cumulated[-1] * uniform, right=True))


def _filter(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The weights (not normalised) that top_k and top_p leave, descending, and their ids."""
    vocab = weights.shape[0]
    if 0 < top_k < vocab:
        kept, ids = _largest(weights, top_k)
        total = kept.sum(dtype=torch.float64)
    else:
        total = weights.sum(dtype=torch.float64)
        for guess in (*_NUCLEUS_GUESSES, vocab):
            kept, ids = _largest(weights, min(guess, vocab))
            if kept.sum(dtype=torch.float64) >= top_p * total:
                break
    if top_p < 1:
        # A token stays while those before it have not filled the nucleus yet.
        before = kept.cumsum(0, dtype=torch.float64) - kept
        count = max(1, int((before < top_p * total).sum()))
        kept, ids = kept[:count], ids[:count]
    return kept, ids


def _largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights, descending, and their ids; of equals the lower id first.

    Zeros may be left out: of a sharp distribution most weights are.
    """
    if count < weights.shape[0]:
        smallest = float(weights.topk(count, sorted=False).values.min())
        large = weights >= smallest if smallest > 0 else weights > 0
        candidates = large.nonzero()[:, 0]
    else:
        candidates = torch.arange(count, device=weights.device)
    kept, order = weights[candidates].sort(descending=True, stable=True)
    return kept[:count], candidates[order[:count]]
