"""How long steps of a worker's engine take here, measured in a process like a worker's."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from pd_cluster.config import Config
from pd_cluster.draw import Draw
from pd_cluster.types import AttemptId, SamplingParams
from pd_cluster.worker.instructions import Batch, Row

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
    """Each step and its median time in seconds, with the engine that workers of `config` have."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, config.model_dump_json()), daemon=True)
    process.start()
    theirs.close()
    try:
        seconds: list[float] = ours.recv()
    finally:
        process.join()
    return list(zip(batches(config.page_size), seconds, strict=True))


def _measure(pipe: Connection, config_json: str) -> None:
    import torch

    from pd_cluster.model.store import resolve_model
    from pd_cluster.worker.engine import Engine

    config = Config.model_validate_json(config_json)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    engine = Engine.load(resolve_model(config.model), config)
    engine.warm_up()
    seconds = []
    for batch in batches(config.page_size):
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            engine.run(batch)
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times))
    pipe.send(seconds)


def _row(start: int, tokens: int, index: int, page_size: int) -> Row:
    ids = np.full(tokens, 300, np.int32)
    end = -(-(start + tokens) // page_size)
    pages = np.arange(end, dtype=np.int32)
    if index:
        pages[-1] = 2048 // page_size + index
    draw = Draw(SamplingParams(max_tokens=1, temperature=0), 0, ids, 0)
    return Row(AttemptId(str(index), 0), ids, start, pages, draw)
