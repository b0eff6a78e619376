"""Choosing tokens where the logits are: only the tokens themselves go to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pd_cluster.model.sampling import uniform
from pd_cluster.types import SamplingParams
from pd_kernels import filter_probabilities


@torch.inference_mode()
def sample_on_device(
    logits: Tensor,
    params: Sequence[SamplingParams],
    sequence: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """As `sampling.sample`, for `logits` [B, vocab] float32 on any device.

    The host waits once, for the tokens. A draw takes the same random number as there; where that
    falls on the edge between two tokens, another device's rounding may decide otherwise.
    """
    greedy = logits.argmax(1)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if drawn:
        rows = _to(logits, drawn, torch.int64)
        chosen = [params[row] for row in drawn]
        numbers = [uniform(params[row].seed, sequence[row], positions[row]) for row in drawn]
        weights = _weights(logits[rows], chosen)
        greedy[rows] = _at(weights, _to(logits, numbers, torch.float64))
    tokens: list[int] = greedy.tolist()
    return tokens


def _weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities, those zero that min_p, top_k or top_p take out."""
    temperature = _to(logits, [each.temperature for each in params], torch.float32)
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature[:, None]).exp()
    vocab = weights.shape[1]
    top_k = [each.top_k if 0 < each.top_k < vocab else vocab for each in params]
    if all(
        k == vocab and each.top_p >= 1 and each.min_p <= 0
        for k, each in zip(top_k, params, strict=True)
    ):
        return weights
    return filter_probabilities(
        weights,
        _to(logits, [each.min_p for each in params], torch.float32),
        _to(logits, top_k, torch.int32),
        _to(logits, [min(each.top_p, 1.0) for each in params], torch.float64),
    )


def _at(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at each row's number, in [0, 1), of the cumulated distribution."""
    cumulated = weights.cumsum(1, dtype=torch.float64)
    at = torch.searchsorted(cumulated, cumulated[:, -1:] * numbers[:, None], right=True)
    return at[:, 0]


def _to(like: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Copied without waiting for the device."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return pinned.to(like.device, non_blocking=True)
