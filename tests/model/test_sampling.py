"""The sampler's distribution, its filters, and that a draw depends on its own key only."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from pd_cluster.model.sampling import sample, uniform
from pd_cluster.types import SamplingParams

# The 99.9 % quantile of chi-square with 7 degrees of freedom.
CHI_SQUARE_7 = 24.32


def params(**settings: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **settings)  # type: ignore[arg-type]


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draw(logits: torch.Tensor, setting: SamplingParams, count: int) -> list[int]:
    """`count` draws from one distribution, at positions 0, 1, ..."""
    return sample(logits.expand(count, -1), [setting] * count, [0] * count, list(range(count)))


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    counts = Counter(tokens)
    return sum(
        (counts[token] - len(tokens) * p) ** 2 / (len(tokens) * p)
        for token, p in enumerate(probabilities)
        if p > 0
    )


WEIGHTS = [0.3, 0.05, 0.2, 0.1, 0.15, 0.02, 0.08, 0.1]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -3])
def test_distribution(seed: int) -> None:
    tokens = draw(logits_of(WEIGHTS), params(seed=seed), 4000)
    assert chi_square(tokens, WEIGHTS) < CHI_SQUARE_7


def test_temperature_sharpens() -> None:
    tokens = draw(logits_of(WEIGHTS), params(temperature=0.5), 4000)
    squares = np.square(WEIGHTS)
    assert chi_square(tokens, list(squares / squares.sum())) < CHI_SQUARE_7


def test_sequences_draw_apart() -> None:
    """The n-th answers of a request share its seed; each is a sample of its own."""
    rows = logits_of(WEIGHTS).expand(4000, -1)
    first, second = (
        sample(rows, [params(seed=4)] * 4000, [number] * 4000, list(range(4000)))
        for number in (0, 1)
    )
    assert chi_square(second, WEIGHTS) < CHI_SQUARE_7
    together = Counter(zip(first, second, strict=True))
    joint = [(together[a, b], 4000 * WEIGHTS[a] * WEIGHTS[b]) for a in range(8) for b in range(8)]
    # 63 degrees of freedom; 99.9 % quantile 103.4
    assert sum((found - expected) ** 2 / expected for found, expected in joint) < 103.4


def test_a_draw_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 1000, generator=generator) * 3
    settings = [
        params(temperature=0.0),
        params(temperature=1.3, seed=7),
        params(top_k=20, seed=8),
        params(top_p=0.8, seed=9),
        params(temperature=2.0, top_k=50, top_p=0.9, min_p=0.01, seed=10),
        params(min_p=0.2, seed=7),
    ] * 4
    sequences = [number % 3 for number in range(24)]
    positions = [100 + number for number in range(24)]
    together = sample(rows, settings, sequences, positions)
    alone = [
        sample(rows[i : i + 1], settings[i : i + 1], sequences[i : i + 1], positions[i : i + 1])[0]
        for i in range(24)
    ]
    assert together == alone
    order = np.random.default_rng(3).permutation(24).tolist()
    shuffled = sample(
        rows[order],
        [settings[i] for i in order],
        [sequences[i] for i in order],
        [positions[i] for i in order],
    )
    assert shuffled == [together[i] for i in order]


def test_greedy_takes_the_first_of_the_best() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(rows, [params(temperature=0.0)] * 2, [0, 0], [0, 0]) == [1, 0]
    mixed = sample(rows, [params(temperature=0.0), params(temperature=1e-6)], [0, 0], [0, 0])
    assert mixed[0] == 1
    assert mixed[1] in (0, 2)


def test_greedy_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.model.sampling.uniform", None)
    assert draw(logits_of(WEIGHTS), params(temperature=0.0), 3) == [0, 0, 0]


def kept(logits: torch.Tensor, setting: SamplingParams, count: int = 3000) -> set[int]:
    return set(draw(logits, setting, count))


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, set(range(8))), (1, {0}), (3, {0, 2, 4}), (8, set(range(8))), (99, set(range(8)))],
)
def test_top_k(top_k: int, expected: set[int]) -> None:
    assert kept(logits_of(WEIGHTS), params(top_k=top_k)) == expected


def test_of_equals_top_k_takes_the_lower_ids() -> None:
    assert kept(torch.zeros(8), params(top_k=3)) == {0, 1, 2}
    assert kept(torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]), params(top_k=2)) == {1, 4}


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, {0}),
        (0.29, {0}),
        # A token stays when those before it are still short of top_p.
        (0.31, {0, 2}),
        (0.64, {0, 2, 4}),
        (0.999, set(range(8))),
    ],
)
def test_top_p(top_p: float, expected: set[int]) -> None:
    assert kept(logits_of(WEIGHTS), params(top_p=top_p)) == expected


def test_top_p_is_of_what_top_k_left() -> None:
    # 0.3, 0.2 and 0.15 are left: 0.46, 0.31 and 0.23 of their sum.
    assert kept(logits_of(WEIGHTS), params(top_k=3, top_p=0.75)) == {0, 2}
    assert kept(logits_of(WEIGHTS), params(top_k=3, top_p=0.8)) == {0, 2, 4}


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, set(range(8))), (0.3, {0, 2, 3, 4, 7}), (0.34, {0, 2, 4}), (0.6, {0, 2}), (1.0, {0})],
)
def test_min_p_is_a_ratio_to_the_likeliest(min_p: float, expected: set[int]) -> None:
    assert kept(logits_of(WEIGHTS), params(min_p=min_p)) == expected


def test_min_p_keeps_all_that_tie_with_the_best() -> None:
    assert kept(torch.tensor([1.0, 0.0, 1.0]), params(min_p=1.0)) == {0, 2}


def test_min_p_comes_after_the_temperature_and_before_top_k_and_top_p() -> None:
    # At temperature 2 the ratios are their roots: 0.1 / 0.3 is 0.58, 0.08 / 0.3 is 0.52.
    assert kept(logits_of(WEIGHTS), params(min_p=0.55, temperature=2.0)) == {0, 2, 3, 4, 7}
    # 0.3, 0.2 and 0.15 are left: 0.46, 0.31 and 0.23 of their sum.
    assert kept(logits_of(WEIGHTS), params(min_p=0.34, top_p=0.75)) == {0, 2}
    assert kept(logits_of(WEIGHTS), params(min_p=0.34, top_p=0.8)) == {0, 2, 4}
    assert kept(logits_of(WEIGHTS), params(min_p=0.34, top_k=2)) == {0, 2}
    assert kept(logits_of(WEIGHTS), params(min_p=0.34, top_k=5)) == {0, 2, 4}


def test_min_p_keeps_the_ratios_of_what_it_leaves() -> None:
    tokens = draw(logits_of(WEIGHTS), params(min_p=0.6, seed=12), 4000)
    assert chi_square(tokens, [0.6, 0, 0.4]) < 10.83  # 1 degree of freedom


def test_weights_too_small_for_a_float_are_no_tokens() -> None:
    logits = torch.zeros(1000)
    logits[7], logits[900] = 20.0, 19.99
    assert kept(logits, params(temperature=0.1, top_k=500)) == {7, 900}
    assert kept(logits, params(temperature=0.1, top_p=0.999)) == {7, 900}


def test_a_nucleus_wider_than_the_first_guess() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, generator=generator) * 0.1
    probabilities = logits.double().softmax(0)
    order = probabilities.argsort(descending=True)
    size = int((probabilities[order].cumsum(0) < 0.5).sum()) + 1
    assert size > 600
    tokens = draw(logits, params(top_p=0.5), 800)
    assert set(tokens) <= set(order[:size].tolist())
    assert len(set(tokens)) > 300


def test_filtered_tokens_keep_their_ratios() -> None:
    tokens = draw(logits_of(WEIGHTS), params(top_k=2, seed=11), 4000)
    assert chi_square(tokens, [0.6, 0, 0.4]) < 10.83  # 1 degree of freedom


def test_impossible_tokens_never_come() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), -100.0, float("-inf")])
    assert kept(logits, params()) == {1}


def test_the_uniform_numbers_stay_as_they_are() -> None:
    """A running cluster may hold two versions: a request must go on as it began."""
    numbers = [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1)]
    expected = [0.011546754286328564, 0.30356803430675683, 0.8133540609793535, 0.5023796042735036]
    assert numbers == expected
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
