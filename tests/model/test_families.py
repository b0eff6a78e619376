"""Llama's relatives, and every feature that their configs can name, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.model.batch import Chunk
from pd_cluster.model.decoder import Decoder
from tests.model.reference import Reference, compare
from tests.model.tiny import Runner, random_ids, save_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Of the waves of theta 500 some are shorter than a quarter of it, some longer than it.
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3_scaling": {"rope_parameters": LLAMA3},
    "linear_scaling": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "smollm2": {
        "tie_word_embeddings": True,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "mistral": {"family": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral_within_its_window": {"family": "mistral", "sliding_window": 48},
    "qwen2_untied": {"family": "qwen2"},
    "qwen2_tied": {"family": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3_tied": {"family": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_biases": {"family": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3_sharded": {"family": "qwen3", "head_dim": 48, "shard_size": "50KB"},
}
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


class Family:
    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self.decoder = Decoder.load(folder, torch.float32)
        self.folder = folder

    def runner(self, page_size: int) -> Runner:
        return Runner(self.decoder, "page_first", page_size, torch.float32)

    def expected(self, *sequences: list[int]) -> torch.Tensor:
        """The logits after the last of each one's tokens."""
        return torch.cat([self.reference.logits_along(ids, [0]) for ids in sequences])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, **FAMILIES[request.param])
    assert len(list(folder.glob("*.safetensors"))) > 1 or "sharded" not in request.param
    return Family(folder)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@PAGE_SIZES
def test_cold(family: Family, page_size: int) -> None:
    runner, ids = family.runner(page_size), random_ids(37, 1)
    close(runner.step([], [Chunk(ids, 0, runner.pages(37))]), family.expected(ids))


@PAGE_SIZES
def test_chunks_after_a_cached_prefix(family: Family, page_size: int) -> None:
    """Two sequences go on from one prefix, in chunks of another length than it was written in."""
    runner = family.runner(page_size)
    prefix, tails = random_ids(16, 2), [random_ids(21, 3), random_ids(9, 4)]
    shared = runner.pages(16)
    for start in (0, 5):
        end = 16 if start else 5
        runner.step([], [Chunk(prefix[start:end], start, shared, logits=False)])
    pages = [shared + runner.pages(len(tail)) for tail in tails]
    chunks = [(0, tails[0][:8]), (1, tails[1])]
    runner.step([], [Chunk(tail, 16, pages[which], logits=False) for which, tail in chunks])
    last = runner.step([Chunk(tails[1][-1:], 24, pages[1])], [Chunk(tails[0][8:], 24, pages[0])])
    close(last, family.expected(prefix + tails[1], prefix + tails[0]))


@PAGE_SIZES
def test_batched_decode_steps(family: Family, page_size: int) -> None:
    """Greedy answers of several sequences at once, each token the reference's own."""
    runner = family.runner(page_size)
    prompts = [random_ids(length, 10 + length) for length in (1, 15, 33)]
    sequences, pages = (
        [list(ids) for ids in prompts],
        [runner.pages(len(ids) + 7) for ids in prompts],
    )
    logits = runner.step([], [Chunk(ids, 0, own) for ids, own in zip(prompts, pages, strict=True)])
    for _ in range(6):
        for tokens, row in zip(sequences, logits, strict=True):
            tokens.append(int(row.argmax()))
        logits = runner.step(
            [
                Chunk(tokens[-1:], len(tokens) - 1, own)
                for tokens, own in zip(sequences, pages, strict=True)
            ],
            [],
        )
    close(logits, family.expected(*sequences))
    for prompt, tokens in zip(prompts, sequences, strict=True):
        assert compare(tokens[len(prompt) :], prompt, family.reference) == []


def test_bfloat16_is_near(family: Family) -> None:
    decoder = Decoder.load(family.folder, torch.bfloat16)
    runner, ids = Runner(decoder, "page_first", 16, torch.bfloat16), random_ids(30, 9)
    expected = family.expected(ids)
    error = runner.step([], [Chunk(ids, 0, runner.pages(30))]) - expected
    assert error.square().mean().sqrt() < 0.05 * expected.std()
