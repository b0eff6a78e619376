"""The decoder against transformers' LlamaForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decoder import Decoder, _Head
from pd_cluster.model.tokenizer import Tokenizer
from tests.model.reference import Reference, compare
from tests.model.tiny import Runner, random_ids, save_tiny

SHAPES: dict[str, dict[str, Any]] = {
    "grouped_untied": {},
    "grouped_tied": {"tie_word_embeddings": True, "rope_theta": 500.0},
    "multi_head": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "own_head_dim": {"head_dim": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-3},
}


class Case:
    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self.folder = folder

    def runner(self, layout: str, page_size: int, dtype: torch.dtype = torch.float32) -> Runner:
        return Runner(Decoder.load(self.folder, dtype), layout, page_size, dtype)

    def expected(self, ids: list[int]) -> torch.Tensor:
        """The logits after the last of `ids`, [1, vocab]."""
        return self.reference.logits_along(ids, [0])


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, **SHAPES[request.param])
    return Case(folder)


def pools(test: Any) -> Any:
    test = pytest.mark.parametrize("layout", ["page_first", "layer_first"])(test)
    return pytest.mark.parametrize("page_size", [1, 16])(test)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pools
def test_cold_prefill(case: Case, layout: str, page_size: int) -> None:
    runner = case.runner(layout, page_size)
    ids = random_ids(37, 1)
    close(runner.step([], [Chunk(ids, 0, runner.pages(37))]), case.expected(ids))


@pools
@pytest.mark.parametrize("chunk", [3, 16])
def test_greedy_tokens_do_not_depend_on_the_chunks(
    case: Case, layout: str, page_size: int, chunk: int
) -> None:
    prompt = random_ids(25, 2)
    answer = case.runner(layout, page_size).greedy(prompt, 9, chunk)
    assert compare(answer, prompt, case.reference) == []
    assert answer == case.reference.greedy(prompt, 9).tokens


@pools
def test_a_cached_prefix_is_read_and_not_rewritten(case: Case, layout: str, page_size: int) -> None:
    runner = case.runner(layout, page_size)
    prefix, tails = random_ids(32, 3), [random_ids(5, 4), random_ids(9, 5)]
    shared = runner.pages(32)
    runner.step([], [Chunk(prefix, 0, shared, logits=False)])
    before = runner.kv.buffer.clone()
    private = [shared + runner.pages(len(tail)) for tail in tails]
    logits = runner.step(
        [], [Chunk(tail, 32, pages) for tail, pages in zip(tails, private, strict=True)]
    )
    close(logits, torch.cat([case.expected(prefix + tail) for tail in tails]))
    for layer in range(runner.kv.num_layers):
        for view in (runner.kv.k(layer), runner.kv.v(layer)):
            old = before.as_strided(view.shape, view.stride(), view.storage_offset())
            assert torch.equal(view[shared], old[shared])


@pools
def test_mixed_batch(case: Case, layout: str, page_size: int) -> None:
    """Decode steps of mixed lengths with prefill chunks, one of which wants no logits."""
    runner = case.runner(layout, page_size)
    decoding = [random_ids(length, 10 + length) for length in (1, 16, 17, 40)]
    pages = [runner.pages(len(ids) + 1) for ids in decoding]
    runner.step([], [Chunk(ids, 0, own) for ids, own in zip(decoding, pages, strict=True)])
    fresh, partial = random_ids(21, 6), random_ids(8, 7)
    logits = runner.step(
        [Chunk([5], len(ids), own) for ids, own in zip(decoding, pages, strict=True)],
        [Chunk(partial, 0, runner.pages(8), logits=False), Chunk(fresh, 0, runner.pages(21))],
    )
    wanted = [*(ids + [5] for ids in decoding), fresh]
    close(logits, torch.cat([case.expected(ids) for ids in wanted]))


def test_nobody_wants_logits(case: Case) -> None:
    runner = case.runner("page_first", 1)
    logits = runner.step([], [Chunk(random_ids(4, 8), 0, runner.pages(4), logits=False)])
    assert logits.shape == (0, case.reference.model.config.vocab_size)


@pools
def test_bfloat16_is_near(case: Case, layout: str, page_size: int) -> None:
    runner = case.runner(layout, page_size, torch.bfloat16)
    ids = random_ids(40, 9)
    pages = runner.pages(41)
    logits = [runner.step([], [Chunk(ids, 0, pages)]), runner.step([Chunk([3], 40, pages)], [])]
    expected = torch.cat([case.expected(ids), case.expected([*ids, 3])])
    error = (torch.cat(logits) - expected).square().mean().sqrt()
    assert error < 0.05 * expected.std()


def test_bfloat16_logits_that_round_to_the_same_are_told_apart() -> None:
    weight = torch.zeros(64, 2, dtype=torch.bfloat16)
    weight[3], weight[40] = torch.tensor([20.0, 0.0]), torch.tensor([20.0, 0.03125])
    logits = _Head(weight)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert logits.argmax() == 40
    assert logits[0, 40] == 20.03125


def test_a_batch_names_rows_slots_and_pages() -> None:
    batch = build_batch(
        [Chunk([9], 5, [4, 2])], [Chunk([7, 8, 6], 2, [1, 3, 0]), Chunk([5], 0, [6], False)], 4
    )
    assert batch.input_ids.tolist() == [9, 7, 8, 6, 5]
    assert batch.positions.tolist() == [5, 2, 3, 4, 0]
    assert batch.slots.tolist() == [9, 6, 7, 12, 24]
    assert batch.q_indptr.tolist() == [0, 1, 4, 5]
    assert batch.kv_indptr.tolist() == [0, 2, 4, 5]
    assert batch.kv_indices.tolist() == [4, 2, 1, 3, 6]
    assert batch.ctx_lens.tolist() == [6, 5, 1]
    assert (batch.num_decode, batch.logits_rows.tolist()) == (1, [0, 3])


def test_smollm2_answers_as_transformers(smollm2: Path) -> None:
    tokenizer, reference = Tokenizer(smollm2), Reference(smollm2)
    decoder = Decoder.load(smollm2, torch.float32)
    for question in ["What is the capital of France?", "Count from one to ten, in 漢字 too 🎉."]:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        answer = Runner(decoder, "page_first", 1, torch.float32).greedy(prompt, 8, 16)
        compare(answer, prompt, reference)
        if "France" in question:
            assert tokenizer.decode(answer) == "The capital of France is Paris."
            assert tuple(answer[-1:]) == decoder.config.eos_token_ids


def test_smollm2_knows_the_capital_in_bfloat16_too(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    runner = Runner(Decoder.load(smollm2, torch.bfloat16), "page_first", 1, torch.bfloat16)
    answer = runner.greedy(tokenizer.apply_chat_template(messages), 8, 512)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
