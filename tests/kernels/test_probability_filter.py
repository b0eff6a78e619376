"""Which tokens stay: the reference by its definition, the other backends by the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pd_kernels import filter_probabilities, filter_probabilities_reference, registry
from tests.kernels.fake_flashinfer import FakeFlashinfer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "triton", "flashinfer"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "torch":
        pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    if request.param == "flashinfer" and DEVICE == "cpu":
        monkeypatch.setattr("pd_kernels.flashinfer_kernels.working", FakeFlashinfer)
    with registry.preferring(DEVICE, request.param):
        yield request.param


def filtered(
    weights: Tensor, min_p: list[float], top_k: list[int], top_p: list[float]
) -> list[list[float]]:
    given = (
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64),
    )
    before = weights.clone()
    out = filter_probabilities(weights.to(DEVICE), *(each.to(DEVICE) for each in given)).cpu()
    assert torch.equal(weights, before)
    torch.testing.assert_close(out, filter_probabilities_reference(weights, *given), rtol=0, atol=0)
    return out.tolist()


def test_each_filter_takes_what_the_one_before_has_left(backend: str) -> None:
    row = [0.1, 0.5, 0.05, 1.0, 0.25, 0.0]
    nothing, by_min_p, by_k, by_p, by_all = filtered(
        torch.tensor([row] * 5),
        min_p=[0, 0.2, 0, 0, 0.1],
        top_k=[6, 6, 2, 6, 3],
        top_p=[1, 1, 1, 0.8, 0.85],
    )
    assert nothing == pytest.approx(row)
    assert by_min_p == [0, 0.5, 0, 1, 0.25, 0]
    assert by_k == [0, 0.5, 0, 1, 0, 0]
    # 0.8 of 1.9 is more than 1.5: a third one begins in the nucleus.
    assert by_p == [0, 0.5, 0, 1, 0.25, 0]
    # Of 1.75, which are left.
    assert by_all == [0, 0.5, 0, 1, 0, 0]


def test_of_equals_the_lower_ids_stay(backend: str) -> None:
    equal = [1.0] * 10
    by_k, by_p, by_both, one = filtered(
        torch.tensor([equal] * 4),
        min_p=[0, 0, 1, 0],
        top_k=[3, 10, 5, 10],
        top_p=[1, 0.8, 0.8, 1e-9],
    )
    assert by_k == [1] * 3 + [0] * 7
    assert by_p == [1] * 8 + [0] * 2
    assert by_both == [1] * 4 + [0] * 6
    assert one == [1] + [0] * 9
    [mixed] = filtered(torch.tensor([[0.25, 1, 0.25, 1, 0.25, 0.25]]), [0], [4], [1])
    assert mixed == [0.25, 1, 0.25, 1, 0, 0]


def test_random_rows(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 300, generator=generator) * 3
    # Many equal ones, as logits of few bits are.
    logits[3:] = (logits[3:] * 2).round() / 2
    filtered(
        (logits - logits.amax(1, keepdim=True)).exp(),
        min_p=[0, 0.01, 0.05, 0, 0.001, 0],
        top_k=[300, 50, 300, 40, 7, 300],
        top_p=[0.9, 0.95, 0.5, 0.7, 1, 0.3],
    )


def test_a_row_does_not_depend_on_the_others(backend: str) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(5, 64, generator=generator)
    settings = [0.1, 0, 0.3, 0, 0], [64, 5, 20, 64, 9], [0.5, 1, 0.8, 0.99, 0.2]
    together = filtered(weights, *settings)
    alone = [
        filtered(weights[row : row + 1], *([each[row]] for each in settings))[0] for row in range(5)
    ]
    assert together == alone


def test_an_empty_batch(backend: str) -> None:
    assert filtered(torch.zeros(0, 8), [], [], []) == []
