"""How long steps of a worker's engine take here, measured in a process like a worker's."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.config import Config
from pd_cluster.draw import Draw
from pd_cluster.types import AttemptId, SamplingParams
from pd_cluster.worker.instructions import Batch, Row

if TYPE_CHECKING:  # which brings torch
    from pd_cluster.worker.engine import Engine

# (tokens, cached before them) of prefill steps; (sequences, tokens of each) of decode steps.
PREFILLS = ((32, 0), (128, 0), (256, 0), (512, 0), (32, 512), (128, 512), (256, 512))
DECODES = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (8, 256))
REPEATS = 5


def batches(page_size: int) -> list[Batch]:
    """The steps that are measured, the one first that computes what others attend to."""
    shared = max(start for _, start in (*PREFILLS, *DECODES))
    steps = [Batch([], [_row(0, shared, 0, page_size)])]
    steps += [Batch([], [_row(start, tokens, 0, page_size)]) for tokens, start in PREFILLS]
    for count, held in DECODES:
        # All read the same pages and write one of their own.
        rows = [_row(held, 1, index, page_size) for index in range(count)]
        steps.append(Batch(rows, []))
    return steps


def measure(config: Config) -> list[tuple[Batch, float]]:
    """Each step and its median time in seconds, with the engine that workers of `config` have.

    Prefill steps are measured while another such process decodes, which a decode worker does nearly
    always: two cores that share one's units, or its bandwidth, are then slower. Decode steps are
    measured alone.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _Process(config) as measured, _Process(config) as beside:
        decodes = measured.ask("decode")
        beside.begin("busy")
        prefills = measured.ask("prefill")
        beside.begin("idle")
    return list(zip(batches(config.page_size), prefills + decodes, strict=True))


class _Process:
    """An engine in a process of its own, ready when entered."""

    def __init__(self, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._theirs, config.model_dump_json()), daemon=True
        )

    def __enter__(self) -> _Process:
        self._process.start()
        self._theirs.close()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def begin(self, task: str) -> None:
        self._pipe.send(task)

    def ask(self, task: str) -> list[float]:
        self.begin(task)
        seconds: list[float] = self._pipe.recv()
        return seconds


def _serve(pipe: Connection, config_json: str) -> None:
    """Measures its `prefill` or `decode` steps, or is `busy` until it is told something else."""
    import torch

    from pd_cluster.model.store import resolve_model
    from pd_cluster.worker.engine import Engine

    config = Config.model_validate_json(config_json)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    engine = Engine.load(resolve_model(config.model), config)
    engine.warm_up()
    steps = batches(config.page_size)
    prefills = [batch for batch in steps if batch.prefill]
    decodes = [batch for batch in steps if batch.decode]
    engine.run(prefills[0])  # what the others attend to
    pipe.send("ready")
    try:
        while True:
            task = pipe.recv()
            while task == "busy" and not pipe.poll():
                engine.run(decodes[2])
            if task in ("prefill", "decode"):
                wanted = prefills if task == "prefill" else decodes
                pipe.send([_median_s(engine, batch) for batch in wanted])
    except EOFError:
        pass


def _median_s(engine: Engine, batch: Batch) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        engine.run(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _row(start: int, tokens: int, index: int, page_size: int) -> Row:
    ids = np.full(tokens, 300, np.int32)
    end = -(-(start + tokens) // page_size)
    pages = np.arange(end, dtype=np.int32)
    if index:
        pages[-1] = 2048 // page_size + index
    draw = Draw(SamplingParams(max_tokens=1, temperature=0), 0, ids, 0)
    return Row(AttemptId(str(index), 0), ids, start, pages, draw)
