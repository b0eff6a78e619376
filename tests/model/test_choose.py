"""What is done to a row's logits before the draw, the logprobs, and that rows are apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pd_cluster.draw import Draw, Drawn
from pd_cluster.model.batch import Chunk
from pd_cluster.model.choose import _adjust, choose
from pd_cluster.model.decoder import Decoder
from pd_cluster.types import SamplingParams
from tests.model.reference import Reference
from tests.model.tiny import Runner, random_ids, save_tiny

TOKENS = [5, 3, 5, 8, 1, 8, 8, 0, 9]  # the first four are the prompt
PROMPT_LEN = 4


def make_draw(
    tokens: list[int] = TOKENS, prompt_len: int = PROMPT_LEN, sequence: int = 0, **settings: Any
) -> Draw:
    params = SamplingParams(max_tokens=100, **settings)
    return Draw.of(params, sequence, np.array(tokens, np.int32), prompt_len, frozenset([2]))


def make_logits(rows: int, vocab: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    logits = logits.clone()
    _adjust(logits, make_draw(**settings))
    return logits


# --- penalties, biases and bans -------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = make_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([TOKENS]), logits.clone())
    assert torch.equal(adjusted(logits[0], repetition_penalty=penalty), expected[0])


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.3), (-1.5, 0.2)])
def test_presence_and_frequency_penalties_are_those_of_openai(
    presence: float, frequency: float
) -> None:
    """Its documentation: mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the answer."""
    logits = make_logits(1)[0]
    expected = logits.clone()
    for token, count in Counter(TOKENS[PROMPT_LEN:]).items():
        expected[token] -= count * frequency + presence
    found = adjusted(logits, presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, logits)


def test_before_the_first_token_nothing_of_the_answer_is_penalised() -> None:
    settings = {"presence_penalty": 1.0, "frequency_penalty": 1.0}
    logits = make_logits(1)[0]
    assert torch.equal(adjusted(logits, tokens=TOKENS[:PROMPT_LEN], **settings), logits)
    only_prompt = adjusted(logits, tokens=TOKENS[:PROMPT_LEN], repetition_penalty=2.0)
    assert (only_prompt != logits).nonzero()[:, 0].tolist() == [3, 5, 8]


def test_penalties_come_before_biases() -> None:
    """The repetition penalty scales what the model said, not what the client added."""
    logits = make_logits(1)[0]
    found = adjusted(
        logits,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((8, 4.0), (11, -3.0)),
    )
    penalised = logits[8] / 2 if logits[8] > 0 else logits[8] * 2
    torch.testing.assert_close(found[8], penalised - 0.5 - 2 * 0.25 + 4)
    torch.testing.assert_close(found[11], logits[11] - 3)
    torch.testing.assert_close(found[[2, 4, 6, 7, 10]], logits[[2, 4, 6, 7, 10]])


def test_biases_force_and_forbid() -> None:
    logits = make_logits(50)
    forced = [make_draw(logit_bias=((7, 100.0),), seed=seed) for seed in range(50)]
    assert {drawn.token for drawn in choose(logits, forced)} == {7}
    best = logits.argmax(-1).tolist()
    barred = [make_draw(logit_bias=((token, -100.0),), temperature=0.0) for token in best]
    second = logits.topk(2).indices[:, 1].tolist()
    assert [drawn.token for drawn in choose(logits, barred)] == second


def test_penalties_steer_what_is_chosen() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 8], logits[0, 4] = 2.0, 1.0
    for settings in (
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.6},
        {"repetition_penalty": 2.1},
    ):
        assert choose(logits, [make_draw(temperature=0.0, **settings)])[0].token == 4
    assert choose(logits, [make_draw(temperature=0.0, frequency_penalty=0.4)])[0].token == 8


def test_nothing_ends_before_min_tokens() -> None:
    answered = len(TOKENS) - PROMPT_LEN
    logits = torch.zeros(200, 12)
    logits[:, 2], logits[:, 6] = 9.0, 9.0  # the model's end, and one of the request's
    for missing, ends in ((1, set()), (0, {2, 6})):
        draws = [
            make_draw(min_tokens=answered + missing, stop_token_ids=(6,), seed=seed)
            for seed in range(200)
        ]
        assert {2, 6} & {drawn.token for drawn in choose(logits, draws)} == ends


# --- filters, against transformers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        (
            {"temperature": 1.7, "min_p": 0.05, "top_k": 6, "top_p": 0.9},
            [
                TemperatureLogitsWarper(1.7),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(6),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_may_come_is_what_transformers_leaves(
    settings: dict[str, float], warpers: list[Any], seed: int
) -> None:
    logits = make_logits(1, 16, seed) / 2
    expected = logits.clone()
    for warper in warpers:
        expected = warper(torch.tensor([TOKENS]), expected)
    probabilities = expected.softmax(-1)[0]
    count = 2000
    draws = [make_draw(list(range(16)) * 2 + [0] * index, **settings) for index in range(count)]
    tokens = Counter(drawn.token for drawn in choose(logits.expand(count, -1), draws))
    assert all(probabilities[token] > 0 for token in tokens)
    for token, probability in enumerate(probabilities.tolist()):
        # Five standard deviations.
        margin = 5 * (count * probability * (1 - probability)) ** 0.5
        assert abs(tokens[token] - count * probability) <= margin


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_whatever_changes_the_draw() -> None:
    logits = make_logits(3)
    before = logits.clone()
    settings: dict[str, Any] = {
        "temperature": 0.3,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "logit_bias": ((1, 5.0),),
        "min_tokens": 90,
    }
    draws = [make_draw(logprobs=5, **settings), make_draw(logprobs=0), make_draw()]
    five, none, absent = choose(logits, draws)
    assert torch.equal(logits, before)
    expected = logits.log_softmax(-1)
    assert five.logprobs is not None
    assert five.logprobs.token == five.token
    assert five.logprobs.logprob == pytest.approx(float(expected[0, five.token]), abs=1e-5)
    best = expected[0].topk(5)
    assert [token for token, _ in five.logprobs.top] == best.indices.tolist()
    values = [value for _, value in five.logprobs.top]
    assert values == pytest.approx(best.values.tolist(), abs=1e-5)
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    assert absent.logprobs is None


@pytest.mark.parametrize("page_size", [1, 16])
def test_logprobs_agree_with_a_reference_forward_pass(tmp_path: Path, page_size: int) -> None:
    """From the first token on, which prefill draws."""
    save_tiny(tmp_path)
    prompt = random_ids(21, 3)
    runner = Runner(Decoder.load(tmp_path, torch.float32), "page_first", page_size, torch.float32)
    chosen = answer(runner, prompt, 8, seed=5, logprobs=7)
    tokens = [drawn.token for drawn in chosen]
    reference = Reference(tmp_path).logits_along(prompt, tokens).log_softmax(-1)
    for drawn, expected in zip(chosen, reference, strict=True):
        assert drawn.logprobs is not None
        assert drawn.logprobs.logprob == pytest.approx(float(expected[drawn.token]), abs=1e-4)
        assert len(drawn.logprobs.top) == 7
        assert [value for _, value in drawn.logprobs.top] == pytest.approx(
            expected.topk(7).values.tolist(), abs=1e-4
        )
        for token, value in drawn.logprobs.top:
            assert value == pytest.approx(float(expected[token]), abs=1e-4)


# --- rows are apart -------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "logprobs": 3},
    {"seed": 2**64 - 1, "top_p": 0.9},
    {"seed": 2**63, "top_k": 40, "min_p": 0.02, "logprobs": 0},
    {"seed": 4, "repetition_penalty": 1.2},
    {"seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 6, "logit_bias": ((3, 5.0), (44, -100.0))},
    {"seed": 7, "min_tokens": 50, "temperature": 1.5},
]


def crowd() -> tuple[torch.Tensor, list[Draw]]:
    draws = [
        make_draw(random_ids(10 + row, row), 6, row % 3, **SETTINGS[row % 8]) for row in range(24)
    ]
    return make_logits(24, 500), draws


def test_a_row_gets_the_same_alone_in_a_batch_and_in_another_slot() -> None:
    logits, draws = crowd()
    together = choose(logits, draws)
    assert [choose(logits[row : row + 1], draws[row : row + 1])[0] for row in range(24)] == together
    order = np.random.default_rng(3).permutation(24).tolist()
    shuffled = choose(logits[order], [draws[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_a_row_gets_the_same_in_another_process() -> None:
    """And with another number of threads."""
    script = (
        "import json, torch; torch.set_num_threads(2)\n"
        "from tests.model.test_choose import choose, crowd\n"
        "print(json.dumps([drawn.token for drawn in choose(*crowd())]))"
    )
    root = Path(__file__).parent.parent.parent
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [drawn.token for drawn in choose(*crowd())]


@pytest.mark.parametrize("change", [{"seed": 1}, {"seed": 1 << 63}, {"sequence": 1}, {"shift": 1}])
def test_seed_sequence_and_position_each_make_another_draw(change: dict[str, int]) -> None:
    def tokens(shift: int = 0, sequence: int = 0, seed: int = 0) -> list[int]:
        draws = [make_draw([0] * (9 + shift + row), 4, sequence, seed=seed) for row in range(60)]
        return [drawn.token for drawn in choose(torch.zeros(60, 500), draws)]

    same = sum(a == b for a, b in zip(tokens(), tokens(**change), strict=True))
    assert same < 5
    assert tokens() == tokens()


def answer(runner: Runner, prompt: list[int], count: int, **settings: Any) -> list[Drawn]:
    """A sequence by itself: the prompt at once, then a step for each token."""
    pages = runner.pages(len(prompt) + count)
    chunk, tokens = Chunk(prompt, 0, pages), list(prompt)
    chosen: list[Drawn] = []
    while len(chosen) < count:
        logits = runner.step([chunk], []) if chosen else runner.step([], [chunk])
        draw = make_draw(tokens, len(prompt), **settings)
        chosen += choose(logits, [draw])
        tokens.append(chosen[-1].token)
        chunk = Chunk(tokens[-1:], len(tokens) - 1, pages)
    return chosen


def test_sequences_of_a_model_go_on_the_same_alone_in_a_crowd_and_elsewhere(
    tmp_path: Path,
) -> None:
    """Four answers to one prompt: each by itself, all at once, and resumed by another engine."""
    save_tiny(tmp_path)
    decoder, count = Decoder.load(tmp_path, torch.float32), 8
    prompt = random_ids(19, 4)

    def runner() -> Runner:
        return Runner(decoder, "page_first", 1, torch.float32)

    alone = [
        [each.token for each in answer(runner(), prompt, count, seed=9, sequence=number)]
        for number in range(4)
    ]
    assert len({tuple(tokens) for tokens in alone}) == 4

    crowded = runner()
    pages = [crowded.pages(len(prompt) + count) for _ in range(4)]
    sequences = [list(prompt) for _ in range(4)]
    for step in range(count):
        start = len(sequences[0]) - 1 if step else 0
        chunks = [
            Chunk(tokens[start:], start, own) for tokens, own in zip(sequences, pages, strict=True)
        ]
        logits = crowded.step(chunks, []) if step else crowded.step([], chunks)
        draws = [
            make_draw(tokens, len(prompt), number, seed=9)
            for number, tokens in enumerate(sequences)
        ]
        for tokens, drawn in zip(sequences, choose(logits, draws), strict=True):
            tokens.append(drawn.token)
    assert [tokens[len(prompt) :] for tokens in sequences] == alone

    for number, tokens in enumerate(alone):
        resumed = [*prompt, *tokens[:3]]
        elsewhere = runner()
        logits = elsewhere.step([], [Chunk(resumed, 0, elsewhere.pages(len(resumed)))])
        draw = make_draw(resumed, len(prompt), number, seed=9)
        assert choose(logits, [draw])[0].token == tokens[3]
