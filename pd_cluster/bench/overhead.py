"""What the cluster adds to the model: first and later tokens over HTTP, against the same engine
called in processes of its own with the same threads and prompts.

As in the cluster one process computes the prompts and another generates, so that each has been idle
as long as its counterpart: where memory that was not touched for a second is slow to touch again,
as in some virtual machines, that is no part of the difference.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.bench.client import generate_at_once, random_tokens, server
from pd_cluster.bench.engine_process import EngineProcess
from pd_cluster.config import load_config
from pd_cluster.draw import Draw
from pd_cluster.types import AttemptId, IntArray, SamplingParams
from pd_cluster.worker.instructions import Batch, Row

if TYPE_CHECKING:  # which brings torch
    from pd_cluster.worker.engine import Engine

PROMPT_TOKENS = 64
NEW_TOKENS = 32
STREAMS = (1, 8)


class Times:
    """Seconds to first tokens, and between later ones."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.later: list[float] = []

    def add(self, start: float, at: list[float]) -> None:
        self.first.append(at[0] - start)
        self.later += [b - a for a, b in pairwise(at)]


def run(*, repeats: int = 15) -> dict[str, float]:
    """Medians at 1 and at 8 streams: `overhead.first_token_ms` and `overhead.token_ms` (at 1) are
    what the cluster takes beyond the engine; `.streams8` the same at 8; each side's own beside.
    """
    config = load_config()
    figures: dict[str, float] = {}
    with (
        server(None) as url,
        EngineProcess(config, _answer) as prefill,
        EngineProcess(config, _answer) as decode,
    ):
        for streams in STREAMS:
            ours, alone = Times(), Times()
            for repeat in range(repeats + 1):
                prompts = _prompts(streams)
                kept = (Times(), Times()) if repeat == 0 else (ours, alone)
                _ask_all(url, prompts, kept[0])
                _run_all(prefill, decode, prompts, kept[1])
            figures |= _figures(streams, ours, alone)
    return figures


def _figures(streams: int, ours: Times, alone: Times) -> dict[str, float]:
    suffix = "" if streams == 1 else f".streams{streams}"
    figures: dict[str, float] = {}
    for name, mine, theirs in (
        ("first_token", ours.first, alone.first),
        ("token", ours.later, alone.later),
    ):
        cluster, engine = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
        figures[f"overhead{suffix}.{name}_ms"] = cluster - engine
        figures[f"overhead{suffix}.{name}_cluster_ms"] = cluster
        figures[f"overhead{suffix}.{name}_engine_ms"] = engine
        figures[f"overhead{suffix}.{name}_ratio"] = cluster / engine
    return figures


def _prompts(streams: int) -> list[list[int]]:
    return [random_tokens(PROMPT_TOKENS) for _ in range(streams)]


def _ask_all(url: str, prompts: list[list[int]], times: Times) -> None:
    for answer in generate_at_once(url, prompts, NEW_TOKENS):
        times.add(answer.start, answer.times)


def _run_all(
    prefill: EngineProcess, decode: EngineProcess, prompts: list[list[int]], times: Times
) -> None:
    start, first, tokens = prefill.ask((prompts, []))
    _, later, _ = decode.ask((prompts, tokens))
    for _ in prompts:
        times.add(start, first + later)


def _answer(pipe: Connection, engine: Engine) -> None:
    # KV memory that nobody has written is one page of zeros, always in the cache: steps would read
    # it for less than they read a prompt's (5 % of a step of eight).
    _generate(engine, [np.array(each, np.int32) for each in _prompts(max(STREAMS))], [])
    while True:
        prompts, tokens = pipe.recv()
        start = time.perf_counter()
        at, drawn = _generate(engine, [np.array(each, np.int32) for each in prompts], tokens)
        pipe.send((start, at, drawn))


def _generate(
    engine: Engine, prompts: list[IntArray], tokens: list[int]
) -> tuple[list[float], list[int]]:
    """When each step's tokens were there, and the last of them: one step that computes all prompts
    or, where their first tokens are given, all steps that follow; whatever their pages hold.
    """
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    room = PROMPT_TOKENS + NEW_TOKENS

    def row(index: int, tokens: IntArray, start: int) -> Row:
        size = engine.layout.page_size
        end = -(-(start + len(tokens)) // size)
        pages = np.arange(end, dtype=np.int32) + index * -(-room // size)
        draw = Draw(params, 0, prompts[index], PROMPT_TOKENS)
        return Row(AttemptId(str(index), 0), tokens, start, pages, draw)

    def run(batch: Batch) -> list[int]:
        drawn = [each.token for each in engine.run(batch)]
        at.append(time.perf_counter())
        return [token for token in drawn if token is not None]

    at: list[float] = []
    if not tokens:
        return at, run(Batch([], [row(index, prompt, 0) for index, prompt in enumerate(prompts)]))
    for position in range(PROMPT_TOKENS, room - 1):
        fresh = [np.array([token], np.int32) for token in tokens]
        tokens = run(Batch([row(index, token, position) for index, token in enumerate(fresh)], []))
    return at, tokens
