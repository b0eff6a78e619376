"""What the cluster adds to the model: first and later tokens over HTTP, against the same engine
called in a process of its own with the same threads and prompts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np

from pd_cluster.bench.prefix import request, server
from pd_cluster.config import Config, load_config
from pd_cluster.types import AttemptId, IntArray, SamplingParams

PROMPT_TOKENS = 64
NEW_TOKENS = 32
STREAMS = (1, 8)
# Low ids exist in every vocabulary; the first are control tokens in most.
_TOKEN_IDS = (256, 8192)


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
    with server(None) as url, _Engine(config) as engine:
        for streams in STREAMS:
            ours, alone = Times(), Times()
            for repeat in range(repeats + 1):
                prompts = _prompts(streams)
                kept = (Times(), Times()) if repeat == 0 else (ours, alone)
                _ask_all(url, prompts, kept[0])
                engine.run(prompts, kept[1])
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
    rng = np.random.default_rng(secrets.randbits(64))
    prompts: list[list[int]] = rng.integers(*_TOKEN_IDS, (streams, PROMPT_TOKENS)).tolist()
    return prompts


def _ask_all(url: str, prompts: list[list[int]], times: Times) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        for at in pool.map(lambda prompt: _ask(url, prompt), prompts):
            times.add(start, at)


def _ask(url: str, prompt: list[int]) -> list[float]:
    """When each token came."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "stream": True, "sampling_params": sampling})
    at: list[float] = []
    with request(url, "POST", "/generate", body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                count = len(json.loads(line[6:])["output_ids"])
                at += [time.perf_counter()] * (count - len(at))
    return at


class _Engine:
    """The worker's engine in a process of its own, with the environment that workers have."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __enter__(self) -> _Engine:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._config.model_dump_json())
        self._process = context.Process(target=_serve_engine, args=arguments, daemon=True)
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def run(self, prompts: list[list[int]], times: Times) -> None:
        self._pipe.send(prompts)
        start, at = self._pipe.recv()
        for _ in prompts:
            times.add(start, at)


def _serve_engine(pipe: Connection, config_json: str) -> None:
    import torch

    from pd_cluster.model.store import resolve_model
    from pd_cluster.worker.engine import Engine

    config = Config.model_validate_json(config_json)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    engine = Engine.load(resolve_model(config.model), config)
    engine.warm_up()
    pipe.send("ready")
    while (prompts := pipe.recv()) is not None:
        start = time.perf_counter()
        pipe.send((start, _generate(engine, [np.array(each, np.int32) for each in prompts])))


def _generate(engine: object, prompts: list[IntArray]) -> list[float]:
    """When each step's tokens were there: one prefill of all prompts, then decode steps."""
    from pd_cluster.draw import Draw
    from pd_cluster.worker.engine import Engine
    from pd_cluster.worker.instructions import Batch, Row

    assert isinstance(engine, Engine)
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
