"""Prefill and decode in two processes on one device, with pages moving from pool to pool.

Decode's pool is opened by the prefill process: by CUDA IPC on a GPU, as shared memory on the CPU.
Prefill gathers its finished pages and scatters them into that pool; only tokens go by the pipe.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from pd_cluster.bench.gpu_check.machine import DEVICE, gpu_kernels, synchronize
from pd_cluster.bench.gpu_check.model import NUM_PAGES, Runner
from pd_cluster.bench.gpu_check.random_model import SMALL, prompt
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.model.batch import Chunk
from pd_kernels import page_gather, page_scatter

LENGTH, STEPS, PAGE_SIZE = 21, 4, 4
_ANSWER_S = 60.0


def run(report: Report) -> None:
    context = mp.get_context("spawn")
    for layout in ("page_first", "layer_first"):
        mine, theirs = context.Pipe()
        decode = context.Process(target=_decode, args=(theirs, layout))
        decode.start()
        theirs.close()
        try:
            with gpu_kernels():
                report(_prefill(mine, layout))
        finally:
            mine.close()
            decode.join(5)
            if decode.is_alive():
                decode.kill()
                decode.join()


def _prefill(decode: Connection, layout: str) -> Result:
    name = f"transfer.{layout}"
    runner = Runner(torch.float32, DEVICE, PAGE_SIZE, layout, graphs=False)
    ids = prompt(SMALL, LENGTH)
    total = -(-(LENGTH + STEPS) // PAGE_SIZE)
    mine = np.arange(total)
    first = int(runner.step([], [Chunk(ids, 0, mine)])[0].argmax())
    expected = _greedy(runner, first, mine)
    # Decode's pages are others than prefill's, and in another order.
    theirs = np.random.default_rng(2).permutation(NUM_PAGES // PAGE_SIZE)[:total]
    if not decode.poll(_ANSWER_S):
        return Result(name, "FAILED", detail="the decode process sent no pool")
    pool: Tensor = decode.recv()
    sent = -(-LENGTH // PAGE_SIZE)
    packed = page_gather(_pages(runner.kv.buffer, layout), _index(mine[:sent]))
    page_scatter(_pages(pool, layout), _index(theirs[:sent]), packed)
    synchronize()
    decode.send((first, theirs.tolist()))
    if not decode.poll(_ANSWER_S):
        return Result(name, "FAILED", detail="the decode process sent no tokens")
    tokens = decode.recv()
    del pool
    decode.send("done")  # memory that is opened elsewhere must not go before
    good = tokens == expected
    detail = f"{sent} pages, {len(tokens)} tokens exact" if good else f"{tokens}, not {expected}"
    return Result(name, "ok" if good else "FAILED", detail=detail)


def _decode(prefill: Connection, layout: str) -> None:
    with gpu_kernels():
        runner = Runner(torch.float32, DEVICE, PAGE_SIZE, layout, graphs=False)
        if not runner.kv.buffer.is_cuda:
            runner.kv.buffer = torch.zeros_like(runner.kv.buffer)
            runner.kv.buffer.share_memory_()  # type: ignore[no-untyped-call]
        prefill.send(runner.kv.buffer)
        first, pages = prefill.recv()
        prefill.send(_greedy(runner, first, np.array(pages)))
        prefill.recv()


def _greedy(
    runner: Runner, first: int, pages: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[int]:
    tokens = [first]
    for at in range(STEPS):
        step = Chunk(np.array(tokens[-1:]), LENGTH + at, pages)
        tokens.append(int(runner.step([step], [])[0].argmax()))
    return tokens


def _pages(buffer: Tensor, layout: str) -> Tensor:
    return buffer if layout == "page_first" else buffer.permute(2, 0, 1, 3, 4, 5)


def _index(pages: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(pages.astype(np.int32)).to(DEVICE)
