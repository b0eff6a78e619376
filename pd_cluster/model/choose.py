"""Choosing tokens: bans, biases, penalties and logprobs around the draw itself.

All of it looks at one row's logits and its own sequence: what comes does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_cluster.draw import Draw, Drawn
from pd_cluster.model.device_sampling import sample_on_device
from pd_cluster.model.sampling import sample
from pd_cluster.types import IntArray, SamplingParams, TokenLogprobs


@torch.inference_mode()
def choose(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """A token for each row of `logits` [B, vocab] float32, in the rows' order.

    Logprobs are those of the model's own distribution, before anything here changes it (as vLLM's
    and OpenAI's).
    """
    if logits.is_cuda and not any(_changes(each) or each.params.logprobs >= 0 for each in draws):
        return [Drawn(token) for token in sample_on_device(logits, *_keys(draws))]
    raw = logits = logits.cpu()
    changed = [row for row, draw in enumerate(draws) if _changes(draw)]
    if changed:
        logits = logits.clone()
        for row in changed:
            _adjust(logits[row], draws[row])
    tokens = sample(logits, *_keys(draws))
    return [
        Drawn(token, _logprobs(raw[row], token, draw.params.logprobs))
        for row, (token, draw) in enumerate(zip(tokens, draws, strict=True))
    ]


def _keys(draws: Sequence[Draw]) -> tuple[list[SamplingParams], list[int], list[int]]:
    """What each draw's random number belongs to."""
    return (
        [draw.params for draw in draws],
        [draw.sequence for draw in draws],
        [len(draw.tokens) for draw in draws],
    )


def _changes(draw: Draw) -> bool:
    params = draw.params
    return bool(
        draw.banned
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _adjust(row: Tensor, draw: Draw) -> None:
    """Changes one row in place: penalties as transformers and vLLM define them, biases, bans."""
    logits, params = row.numpy(), draw.params  # whose small gathers cost less than torch's
    if params.repetition_penalty != 1.0:
        ids, _ = _counted(draw.tokens)
        values, penalty = logits[ids], params.repetition_penalty
        logits[ids] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = _counted(draw.tokens[draw.prompt_len :])
        logits[ids] -= counts * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        np.add.at(logits, np.array(biased), np.array(biases, np.float32))
    if draw.banned:
        logits[list(draw.banned)] = -np.inf


def _counted(tokens: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """The ids in `tokens` and how often each is there: by counting, as sorting takes longer."""
    counts = torch.bincount(torch.from_numpy(tokens)).numpy()
    ids = np.flatnonzero(counts > 0)
    return ids, counts[ids].astype(np.float32)


def _logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs | None:
    """None where `top` is negative."""
    if top < 0:
        return None
    total = torch.logsumexp(logits, -1)
    likeliest: tuple[tuple[int, float], ...] = ()
    if top:
        best = logits.topk(top)
        pairs = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
        likeliest = tuple(pairs)
    return TokenLogprobs(token, float(logits[token] - total), likeliest)
