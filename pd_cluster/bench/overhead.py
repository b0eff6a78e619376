"""What the cluster adds to the model: first and later tokens over HTTP, against the same engine
called in a process of its own with the same threads and prompts.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.bench.client import generate, random_tokens, server
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


def run(*, repeats: int = 7) -> dict[str, float]:
    """Medians at 1 and at 8 streams: `overhead.first_token_ms` and `overhead.token_ms` (at 1) are
    what the cluster takes beyond the engine; `.streams8` the same at 8; each side's own beside.
    """
    config = load_config()
    figures: dict[str, float] = {}
    with server(None) as url, EngineProcess(config, _answer) as engine:
        for streams in STREAMS:
            ours, alone = Times(), Times()
            for repeat in range(repeats + 1):
                prompts = _prompts(streams)
                kept = (Times(), Times()) if repeat == 0 else (ours, alone)
                _ask_all(url, prompts, kept[0])
                _run_all(engine, prompts, kept[1])
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
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        ask = lambda prompt: generate(url, prompt, NEW_TOKENS)  # noqa: E731
        for answer in pool.map(ask, prompts):
            times.add(start, answer.times)


def _run_all(engine: EngineProcess, prompts: list[list[int]], times: Times) -> None:
    start, at = engine.ask(prompts)
    for _ in prompts:
        times.add(start, at)


def _answer(pipe: Connection, engine: Engine) -> None:
    while True:
        prompts = [np.array(each, np.int32) for each in pipe.recv()]
        start = time.perf_counter()
        pipe.send((start, _generate(engine, prompts)))


def _generate(engine: Engine, prompts: list[IntArray]) -> list[float]:
    """When each step's tokens were there: one prefill of all prompts, then decode steps."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    room = PROMPT_TOKENS + NEW_TOKENS

    def row(index: int, tokens: IntArray, start: int) -> Row:
        size = engine.layout.page_size
        end = -(-(start + len(tokens)) // size)
        pages = np.arange(end, dtype=np.int32) + index * -(-room // size)
        draw = Draw(params, 0, prompts[index], PROMPT_TOKENS)
        return Row(AttemptId(str(index), 0), tokens, start, pages, draw)

    batch = Batch([], [row(index, prompt, 0) for index, prompt in enumerate(prompts)])
    at = []
    for step in range(NEW_TOKENS):
        drawn = engine.run(batch)
        at.append(time.perf_counter())
        tokens = [np.array([each.token], np.int32) for each in drawn]
        position = PROMPT_TOKENS + step
        batch = Batch([row(index, token, position) for index, token in enumerate(tokens)], [])
    return at
