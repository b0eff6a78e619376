"""Fixtures of the tests that run a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.live import Live, live
from tests.cluster.prompts import varied_prompts
from tests.model.reference import Reference, compare


class Judge:
    """Holds answers against one plain forward pass of transformers; each answer once."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self._judged: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.ties = 0

    def check(self, prompt: list[int], answer: list[int]) -> None:
        key = (tuple(prompt), tuple(answer))
        if key not in self._judged:
            ties = compare(answer, prompt, self._reference)
            self.ties += len(ties)
            for tie in ties:
                print(f"a tie, which counts as equal: {tie}")
            self._judged.add(key)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@pytest.fixture(scope="session")
def judge(smollm2: Path) -> Judge:
    return Judge(smollm2)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return varied_prompts(tokenizer)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    """One prefill and one decode worker, as the embedded default."""
    with live() as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the cluster comes to rest, and every invariant holds."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").settle()
