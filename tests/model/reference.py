"""Greedy decoding by transformers in float32, and how our tokens are held against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# Two logits closer than this are a tie, which rounding may decide either way (design.md, 5).
TIE = 1e-4


@dataclass(frozen=True)
class Answer:
    """`gaps[i]` is how far the two best logits were apart when `tokens[i]` was chosen."""

    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Tie:
    """A step at which we chose `ours` and transformers `theirs`, for lack of a difference."""

    step: int
    ours: int
    theirs: int
    gap: float


class Reference:
    """transformers' model of a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int, stop: Collection[int] = ()) -> Answer:
        """Up to `max_tokens` tokens, the last one in `stop` where it came to that."""
        answer = Answer([], [])
        new, cache = torch.tensor([list(prompt)]), None
        while len(answer.tokens) < max_tokens:
            out = self.model(new, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            best = out.logits[0, -1].topk(2)
            answer.tokens.append(int(best.indices[0]))
            answer.gaps.append(float(best.values[0] - best.values[1]))
            if answer.tokens[-1] in stop:
                break
            new = best.indices[:1][None]
        return answer

    @torch.inference_mode()
    def logits_along(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The logits from which each of `tokens` was to be chosen, [len(tokens), vocab]."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits: torch.Tensor = self.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        return logits


def compare(ours: Sequence[int], prompt: Sequence[int], reference: Reference) -> list[Tie]:
    """Asserts that every one of our tokens is the reference's choice after those before it.

    So after a tie the reference goes on along our tokens. Returns the ties, which are no failures.
    """
    ties = []
    for step, (token, logits) in enumerate(
        zip(ours, reference.logits_along(prompt, ours), strict=True)
    ):
        best = int(logits.argmax())
        gap = float(logits[best] - logits[token])
        assert gap <= TIE, (
            f"token {step}: ours is {token}, the reference's {best}, whose logit is {gap:.2e} above"
        )
        if token != best:
            ties.append(Tie(step, token, best, gap))
    return ties
