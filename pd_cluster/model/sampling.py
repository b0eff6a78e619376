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

# How many of the largest weights to look at first for a nucleus; it is seldom wider.
_NUCLEUS_GUESS = 256

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
    temperature 0 the largest logit wins, the lowest id of equals. Otherwise top_k filters first and
    top_p what is left of it, renormalised, as in vLLM and transformers.
    """
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if not drawn:
        return logits.argmax(-1).tolist()
    tokens = [0] * len(params)
    if len(drawn) < len(params):
        tokens = logits.argmax(-1).tolist()
        logits = logits[drawn]
    temperatures = logits.new_tensor([params[row].temperature for row in drawn])
    weights = (logits - logits.amax(-1, keepdim=True)).div_(temperatures[:, None]).exp_()
    for index, row in enumerate(drawn):
        _filter(weights[index], params[row].top_k, params[row].top_p)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    uniforms = [uniform(params[row].seed, sequence[row], positions[row]) for row in drawn]
    targets = cumulated[:, -1] * cumulated.new_tensor(uniforms)
    chosen = torch.searchsorted(cumulated, targets[:, None], right=True)
    for row, token in zip(drawn, chosen[:, 0].tolist(), strict=True):
        tokens[row] = token
    return tokens


def uniform(seed: int, sequence: int, position: int) -> float:
    """A number in [0, 1 - 2^-48] that belongs to this key (Philox 4x64, Salmon et al., 2011)."""
    key = np.array([seed & _SEED_MASK, sequence], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position).random_raw()
    # 48 bits: times a sum of weights it stays below the sum after rounding.
    return int(bits >> 16) * 2.0**-48


def _filter(weights: Tensor, top_k: int, top_p: float) -> None:
    """Sets to 0 in place what top_k and top_p exclude of one row's weights (not normalised)."""
    vocab = weights.shape[0]
    limit = top_k if 0 < top_k < vocab else vocab
    if limit == vocab and top_p >= 1:
        return
    total = weights.sum(dtype=torch.float64)
    if limit < vocab:
        kept, ids = _largest(weights, limit)
        total = kept.sum(dtype=torch.float64)
    else:
        kept, ids = _largest(weights, min(_NUCLEUS_GUESS, vocab))
        if kept.sum(dtype=torch.float64) < top_p * total:
            kept, ids = _largest(weights, vocab)
    if top_p < 1:
        # A token stays while those before it have not filled the nucleus yet.
        before = kept.cumsum(0, dtype=torch.float64) - kept
        count = max(1, int((before < top_p * total).sum()))
        kept, ids = kept[:count], ids[:count]
    weights.zero_()
    weights[ids] = kept


def _largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights, descending, and their ids; of equals the lower id first."""
    if count < weights.shape[0]:
        smallest = weights.topk(count).values[-1]
        candidates = (weights >= smallest).nonzero()[:, 0]
    else:
        candidates = torch.arange(count, device=weights.device)
    kept, order = weights[candidates].sort(descending=True, stable=True)
    return kept[:count], candidates[order[:count]]
