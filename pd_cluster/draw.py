"""A choice of one token: what goes into it and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pd_cluster.types import IntArray, SamplingParams, TokenLogprobs


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


class Drawn(NamedTuple):
    """A chosen token, and its logprobs where they were asked for."""

    token: int
    logprobs: TokenLogprobs | None = None
