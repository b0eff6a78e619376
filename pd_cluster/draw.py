"""What is made of a step's logits: the choice of a token, the scores of those that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.types import IntArray, PromptScores, SamplingParams, TokenLogprobs

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draw:
    """How a sequence's next token is chosen.

    `tokens` is the sequence so far, of which the first `prompt_len` are the prompt; `banned` tokens
    may not be chosen. The token's position, `len(tokens)`, is the same on every worker and attempt.
    """

    params: SamplingParams
    sequence: int
    tokens: IntArray
    prompt_len: int
    banned: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        sequence: int,
        tokens: IntArray,
        prompt_len: int,
        eos: frozenset[int],
    ) -> Draw:
        """Bans what would end the sequence before its `min_tokens`."""
        banned: frozenset[int] = frozenset()
        if len(tokens) - prompt_len < params.min_tokens:
            banned = eos.union(params.stop_token_ids)
        return cls(params, sequence, tokens, prompt_len, banned)


@dataclass(frozen=True, slots=True)
class Known:
    """Tokens that follow those of a row, whose logprobs are wanted; `top`: how many of the
    likeliest with each.
    """

    tokens: IntArray
    top: int


class Scores(NamedTuple):
    """Of N known tokens: logprobs [N] float32, ranks [N] int32 (1 is the likeliest), and the
    likeliest tokens there, [N, top] int32, with their logprobs, [N, top] float32.
    """

    logprobs: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


def pack_scores(parts: Sequence[Scores]) -> PromptScores:
    """Those of a prompt's chunks, in order."""
    whole = Scores(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    return PromptScores(
        top=whole.top_ids.shape[1],
        logprobs=whole.logprobs.astype("<f4").tobytes(),
        ranks=whole.ranks.astype("<i4").tobytes(),
        top_ids=whole.top_ids.astype("<i4").tobytes(),
        top_logprobs=whole.top_logprobs.astype("<f4").tobytes(),
    )


def unpack_scores(packed: PromptScores) -> Scores:
    logprobs = np.frombuffer(packed.logprobs, "<f4")
    shape = (len(logprobs), packed.top)
    return Scores(
        logprobs,
        np.frombuffer(packed.ranks, "<i4"),
        np.frombuffer(packed.top_ids, "<i4").reshape(shape),
        np.frombuffer(packed.top_logprobs, "<f4").reshape(shape),
    )


class Drawn(NamedTuple):
    """What a row's logits gave: a chosen token, with its logprobs where they were asked for, and
    the scores of known tokens; None each where it was not wanted.
    """

    token: int | None
    logprobs: TokenLogprobs | None = None
    scores: Scores | None = None
