"""How long steps of a worker's engine take here, measured in a process like a worker's."""

from __future__ import annotations

import statistics
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.bench.engine_process import EngineProcess
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
    with EngineProcess(config, _steps) as measured, EngineProcess(config, _steps) as beside:
        decodes = measured.ask("decode")
        beside.tell("busy")
        prefills = measured.ask("prefill")
        beside.tell("idle")
    return list(zip(batches(config.page_size), prefills + decodes, strict=True))


def _steps(pipe: Connection, engine: Engine) -> None:
    """Measures its `prefill` or `decode` steps, or is `busy` until it is told something else."""
    steps = batches(engine.layout.page_size)
    prefills = [batch for batch in steps if batch.prefill]
    decodes = [batch for batch in steps if batch.decode]
    engine.run(prefills[0])  # what the others attend to
    while True:
        task = pipe.recv()
        while task == "busy" and not pipe.poll():
            engine.run(decodes[2])
        if task in ("prefill", "decode"):
            wanted = prefills if task == "prefill" else decodes
            pipe.send([_median_s(engine, batch) for batch in wanted])


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
