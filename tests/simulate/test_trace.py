"""Traces as published, and generated ones: only small ones made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.simulate.trace import conversations, lru_hit_rate, read_trace, scale

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
]


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncakes_blocks_are_runs_of_512_tokens(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path / "trace.jsonl", LINES))
    assert (first.arrival, first.max_tokens, first.prompt_len) == (0.0, 5, 1100)
    assert (second.arrival, second.max_tokens) == (3.0, 1)
    tokens = first.tokens()
    assert tokens.dtype == np.int32
    assert np.array_equal(tokens[:1024], second.tokens())
    assert tokens[1024:].tolist() == [2] * 76
    assert first.answer_token != second.answer_token


def test_azures_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    later = tmp_path / "later.csv"
    later.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:02+00:00,2399,6\n"
    )
    assert [each.arrival for each in read_trace(later)] == [0.0, 1.99007]
    first, second = read_trace(path)
    assert second.arrival == pytest.approx(4.314579)
    assert (first.prompt_len, first.max_tokens) == (374, 44)
    assert first.tokens()[0] != second.tokens()[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 0}\n', "no 'input_length'; expected Mooncake's"),
        ("a.jsonl", "not json\n", "expected Mooncake's"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "1 blocks for 600 tokens",
        ),
        ("a.csv", "a,b\n1,2\n", "no 'TIMESTAMP'; expected .* Azure's columns"),
    ],
)
def test_what_is_no_trace_is_an_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    path.write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_trace(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_scaled_trace_has_copies_of_other_content(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "trace.jsonl", LINES))
    scaled = scale(trace, 3, 1.0)
    assert len(scaled) == 3
    assert [request.arrival for request in scaled] == sorted(r.arrival for r in scaled)
    assert len({request.answer_token for request in scaled}) == 3
    assert len({request.prompt for request in scaled}) == 3


def test_each_turn_of_a_conversation_contains_the_answer_before() -> None:
    trace = conversations(5, seed=1)
    assert trace == conversations(5, seed=1)
    assert trace != conversations(5, seed=2)
    turns = [request for request in trace if request.after is not None]
    assert turns
    for request in turns:
        assert request.after is not None
        before = trace[request.after]
        answer = (before.answer_token, before.max_tokens)
        assert request.prompt[: len(before.prompt) + 1] == (*before.prompt, answer)


def test_one_lru_cache_is_the_yardstick(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids}
        for ids in ([0, 1], [0, 1], [0, 2], [0, 1])
    ]
    trace = read_trace(write(tmp_path / "trace.jsonl", lines))
    # A prompt that is held whole still has its last token computed.
    assert lru_hit_rate(trace, 10, 512) == (1023 + 512 + 1023) / 4096
    assert lru_hit_rate(trace, 2, 512) == (1023 + 512 + 512) / 4096
