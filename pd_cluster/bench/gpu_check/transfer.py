"""Prefill and decode in two processes on one device, with pages moving from pool to pool.

First without the transfer library: decode's pool is opened by the prefill process, by CUDA IPC on a
GPU and as shared memory on the CPU; prefill gathers its finished pages and scatters them into that
pool. Then, where it can be loaded, as in a cluster (ucx_transfer.py). Only tokens go by the pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from pd_cluster.bench.gpu_check.machine import DEVICE, gpu_kernels, synchronize
from pd_cluster.bench.gpu_check.model import Runner
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.bench.gpu_check.two_processes import (
    LAYOUTS,
    LENGTH,
    PAGE_SIZE,
    Ids,
    answer,
    compared,
    greedy,
    prefilled,
)
from pd_kernels import page_gather, page_scatter


def run(report: Report) -> None:
    by_library: Callable[[Connection, Report], None] | None = None
    try:
        from pd_cluster.bench.gpu_check import ucx_transfer

        by_library = ucx_transfer.run
    except ImportError as error:
        detail = f"pd_transfer cannot be loaded: {error}"
        report(Result("transfer.ucx", "skipped", detail=detail))
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    decode = context.Process(target=_decode, args=(theirs,))
    decode.start()
    theirs.close()
    try:
        with gpu_kernels():
            for layout in LAYOUTS:
                report(_prefill(pipe, layout))
            if by_library is not None:
                by_library(pipe, report)
        pipe.send("end")
    finally:
        pipe.close()
        decode.join(5)
        if decode.is_alive():
            decode.kill()
            decode.join()


def _prefill(decode: Connection, layout: str) -> Result:
    runner, first, expected, mine, theirs = prefilled(layout)
    decode.send(("open", layout))
    pool: Tensor = answer(decode, "pool")
    sent = -(-LENGTH // PAGE_SIZE)
    packed = page_gather(_pages(runner.kv.buffer, layout), _index(mine[:sent]))
    page_scatter(_pages(pool, layout), _index(theirs[:sent]), packed)
    synchronize()
    decode.send((first, theirs.tolist()))
    tokens = answer(decode, "tokens")
    del pool
    decode.send("done")  # memory that is opened elsewhere must not go before
    return compared(f"transfer.{layout}", tokens, expected, f"{sent} pages")


def _decode(prefill: Connection) -> None:
    """The other process: does what it is told until it is told "end"."""
    with gpu_kernels():
        while (order := prefill.recv()) != "end":
            way, layout = order
            if way == "open":
                _be_opened(prefill, layout)
                continue
            from pd_cluster.bench.gpu_check import ucx_transfer

            ucx_transfer.decode(prefill, way, layout)


def _be_opened(prefill: Connection, layout: str) -> None:
    runner = Runner(torch.float32, DEVICE, PAGE_SIZE, layout, graphs=False)
    if not runner.kv.buffer.is_cuda:
        runner.kv.buffer = torch.zeros_like(runner.kv.buffer)
        runner.kv.buffer.share_memory_()  # type: ignore[no-untyped-call]
    prefill.send(runner.kv.buffer)
    first, pages = prefill.recv()
    prefill.send(greedy(runner, first, np.array(pages)))
    prefill.recv()


def _pages(buffer: Tensor, layout: str) -> Tensor:
    return buffer if layout == "page_first" else buffer.permute(2, 0, 1, 3, 4, 5)


def _index(pages: Ids) -> Tensor:
    return torch.from_numpy(pages.astype(np.int32)).to(DEVICE)
