"""Pages moved by `pd_transfer`, as in a cluster: out of VRAM into VRAM on a GPU, by UCX."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from pd_cluster.bench.gpu_check.machine import DEVICE, ON_GPU, synchronize
from pd_cluster.bench.gpu_check.model import Runner
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.bench.gpu_check.two_processes import (
    LAYOUTS,
    LENGTH,
    PAGE_SIZE,
    answer,
    compared,
    greedy,
    prefilled,
)
from pd_transfer import agent, nixl_agent, nixl_xfer_handle
from pd_transfer.ucx import UcxBackend  # so that a missing UCXX is noticed here

NAME = "transfer.ucx"
_SECRET = b"of one check"
_TRANSFER_S = 20.0
# What is written to measure, in pieces that are in another order at the other end.
_BYTES, _PIECE = (256 << 20, 128 << 10) if ON_GPU else (1 << 20, 16 << 10)
_ROUNDS = 10

_Rows = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


def run(decode: Connection, report: Report) -> None:
    """The prefill process's part."""
    try:
        for layout in LAYOUTS if ON_GPU else LAYOUTS[:1]:
            report(_prefill(decode, layout))
        unit = f"GB/s of {UcxBackend.kind} WRITEs, {_PIECE >> 10} KiB each, scattered"
        report(Result(f"{NAME}.write_gbps", "measured", _speed(decode) / 1e9, unit))
    except Exception as error:  # NIXL's errors have no common base
        report(Result(NAME, "FAILED", detail=f"{type(error).__name__}: {error}"[:300]))


def decode(prefill: Connection, way: str, layout: str) -> None:
    """The decode process's part of one order."""
    if way == "measure":
        _be_measured(prefill)
        return
    runner = Runner(torch.float32, DEVICE, PAGE_SIZE, layout, graphs=False)
    kv = runner.kv
    synchronize()
    with agent(name=f"decode {layout}", secret=_SECRET) as made:
        made.register_memory([(*kv.region(), "")], kv.mem_type)
        prefill.send((made.get_agent_metadata(), kv.region()))
        first, pages = prefill.recv()
        prefill.send(greedy(runner, first, np.array(pages)))


def _prefill(decode: Connection, layout: str) -> Result:
    runner, first, expected, mine, theirs = prefilled(layout)
    kv = runner.kv
    decode.send(("write", layout))
    with agent(name="prefill", secret=_SECRET) as made:
        made.register_memory([(*kv.region(), "")], kv.mem_type)
        metadata, region = answer(decode, "pool")
        made.add_remote_agent(metadata)
        sent = -(-LENGTH // PAGE_SIZE)
        handle = made.make_prepped_xfer(
            "WRITE",
            made.prep_xfer_dlist("NIXL_INIT_AGENT", kv.descriptors(), kv.mem_type),
            kv.rows(mine[:sent].astype(np.int32)),
            made.prep_xfer_dlist(f"decode {layout}", kv.descriptors(region), kv.mem_type),
            kv.rows(theirs[:sent].astype(np.int32)),
        )
        synchronize()
        _finish(made, handle)
        decode.send((first, theirs.tolist()))
        tokens = answer(decode, "tokens")
    return compared(f"{NAME}.{layout}", tokens, expected, f"{sent} pages of {kv.mem_type}")


def _speed(decode: Connection) -> float:
    """Bytes a second of the best of some WRITEs."""
    memory = torch.ones(_BYTES, dtype=torch.uint8, device=DEVICE)
    kind = "VRAM" if memory.is_cuda else "DRAM"
    decode.send(("measure", ""))
    with agent(name="source", secret=_SECRET) as made:
        made.register_memory(memory)
        metadata, address = answer(decode, "memory")
        made.add_remote_agent(metadata)
        count = _BYTES // _PIECE
        handle = made.make_prepped_xfer(
            "WRITE",
            made.prep_xfer_dlist("NIXL_INIT_AGENT", _pieces(memory.data_ptr()), kind),
            np.arange(count),
            made.prep_xfer_dlist("target", _pieces(address), kind),
            np.random.default_rng(3).permutation(count),
        )
        synchronize()
        best = min(_finish(made, handle) for _ in range(_ROUNDS))
        decode.send("done")
        if not answer(decode, "look at what arrived"):
            raise RuntimeError("not all bytes arrived")
    return _BYTES / best


def _be_measured(prefill: Connection) -> None:
    memory = torch.zeros(_BYTES, dtype=torch.uint8, device=DEVICE)
    synchronize()
    with agent(name="target", secret=_SECRET) as made:
        made.register_memory(memory)
        prefill.send((made.get_agent_metadata(), memory.data_ptr()))
        prefill.recv()
        prefill.send(bool((memory == 1).all()))


def _finish(made: nixl_agent, handle: nixl_xfer_handle) -> float:
    """Posts it and waits for its end; the seconds that took.

    Raises:
        TimeoutError: it takes too long.
    """
    begin = time.monotonic()
    made.transfer(handle)
    while made.check_xfer_state(handle) == "PROC":
        if time.monotonic() - begin > _TRANSFER_S:
            raise TimeoutError(f"a transfer was not over after {_TRANSFER_S:.0f} s")
    return time.monotonic() - begin


def _pieces(address: int) -> _Rows:
    rows = np.zeros((_BYTES // _PIECE, 3), np.uint64)
    rows[:, 0] = np.arange(address, address + _BYTES, _PIECE, dtype=np.uint64)
    rows[:, 1] = _PIECE
    return rows
