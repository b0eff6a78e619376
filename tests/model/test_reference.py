"""The yardstick itself: what counts as a difference and what as a tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.reference import Reference, Tie, compare
from tests.model.tiny import random_ids, save_tiny


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    save_tiny(tmp_path)
    return Reference(tmp_path)


def test_a_greedy_answer_is_its_own_reference(reference: Reference) -> None:
    prompt = random_ids(9, 1)
    answer = reference.greedy(prompt, 6)
    logits = reference.logits_along(prompt, answer.tokens)
    assert logits.argmax(-1).tolist() == answer.tokens
    best = logits.topk(2).values
    assert answer.gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-5)
    assert compare(answer.tokens, prompt, reference) == []
    assert reference.greedy(prompt, 6, stop=answer.tokens[2:3]).tokens == answer.tokens[:3]


def test_a_difference_fails(reference: Reference) -> None:
    prompt = random_ids(9, 1)
    tokens = reference.greedy(prompt, 6).tokens
    tokens[3] = (tokens[3] + 1) % 97
    with pytest.raises(AssertionError, match=f"token 3: ours is {tokens[3]}, the reference's"):
        compare(tokens, prompt, reference)


def test_a_tie_is_reported_and_the_rest_held_against_our_own_tokens(reference: Reference) -> None:
    prompt = random_ids(9, 1)
    first = reference.greedy(prompt, 1).tokens[0]
    # A token as good as the first one everywhere, with another embedding.
    twin = first + 1
    with torch.no_grad():
        head = reference.model.lm_head.weight
        head[twin] = head[first]
    ours = [twin, *reference.greedy([*prompt, twin], 5).tokens]
    ties = compare(ours, prompt, reference)
    assert ties[0] == Tie(0, twin, first, 0.0)
