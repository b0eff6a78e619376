"""What the ways of moving pages between two processes are checked with."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from pd_cluster.bench.gpu_check.machine import DEVICE
from pd_cluster.bench.gpu_check.model import NUM_PAGES, Runner
from pd_cluster.bench.gpu_check.random_model import SMALL, prompt
from pd_cluster.bench.gpu_check.results import Result
from pd_cluster.model.batch import Chunk

LENGTH, STEPS, PAGE_SIZE = 21, 4, 4
LAYOUTS = ("page_first", "layer_first")
_ANSWER_S = 60.0

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class Prefilled(NamedTuple):
    """A prompt's KV in pages `mine`, its first token and continuation, and decode's pages."""

    runner: Runner
    first: int
    expected: list[int]
    mine: Ids
    theirs: Ids


def prefilled(layout: str) -> Prefilled:
    runner = Runner(torch.float32, DEVICE, PAGE_SIZE, layout, graphs=False)
    ids = prompt(SMALL, LENGTH)
    total = -(-(LENGTH + STEPS) // PAGE_SIZE)
    mine = np.arange(total)
    first = int(runner.step([], [Chunk(ids, 0, mine)])[0].argmax())
    expected = greedy(runner, first, mine)
    # Decode's pages are others than prefill's, and in another order.
    theirs = np.random.default_rng(2).permutation(NUM_PAGES // PAGE_SIZE)[:total]
    return Prefilled(runner, first, expected, mine, theirs)


def answer(pipe: Connection, what: str) -> Any:
    """
    Raises:
        TimeoutError: it does not come.
    """
    if not pipe.poll(_ANSWER_S):
        raise TimeoutError(f"the other process sent no {what}")
    return pipe.recv()


def compared(name: str, tokens: list[int], expected: list[int], sent: str) -> Result:
    if tokens != expected:
        return Result(name, "FAILED", detail=f"{tokens}, not {expected}")
    return Result(name, "ok", detail=f"{sent}, {len(tokens)} tokens exact")


def greedy(runner: Runner, first: int, pages: Ids) -> list[int]:
    tokens = [first]
    for at in range(STEPS):
        step = Chunk(np.array(tokens[-1:]), LENGTH + at, pages)
        tokens.append(int(runner.step([step], [])[0].argmax()))
    return tokens
