"""Choosing tokens: bans, biases, penalties and logprobs around the draw itself.

All of it looks at one row's logits and its own sequence: what comes does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pd_cluster.draw import Draw, Drawn
from pd_cluster.model.sampling import sample
from pd_cluster.types import TokenLogprobs


@torch.inference_mode()
def choose(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """A token for each row of `logits` [B, vocab] float32, in the rows' order.

    Logprobs are those of the model's own distribution, before anything here changes it (as vLLM's
    and OpenAI's).
    """
    raw = logits
    changed = [row for row, draw in enumerate(draws) if _changes(draw)]
    if changed:
        logits = logits.clone()
        for row in changed:
            _adjust(logits[row], draws[row])
    tokens = sample(
        logits,
        [draw.params for draw in draws],
        [draw.sequence for draw in draws],
        [len(draw.tokens) for draw in draws],
    )
    return [
        Drawn(token, _logprobs(raw[row], token, draw.params.logprobs))
        for row, (token, draw) in enumerate(zip(tokens, draws, strict=True))
    ]


def _changes(draw: Draw) -> bool:
    params = draw.params
    return bool(
        draw.banned
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _adjust(logits: Tensor, draw: Draw) -> None:
    """Changes one row in place: penalties as transformers and vLLM define them, biases, bans."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(draw.tokens).astype(np.int64))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(draw.tokens[draw.prompt_len :], return_counts=True)
        weights = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(weights).to(logits)
    for token, bias in params.logit_bias:
        logits[token] += bias
    if draw.banned:
        logits[list(draw.banned)] = -torch.inf


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
