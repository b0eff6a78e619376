"""Speed between two processes of one host, against memcpy in the same run."""

from __future__ import annotations

import json
import queue
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pd_transfer import Event, agent, nixl_agent
from pd_transfer.descriptors import Rows

DEFAULT_SIZES: Final = (384, 23_040, 65_536, 262_144, 1_048_576)
# One token's KV of SmolLM2-135M in bfloat16: a page of page_size 1.
PAGE: Final = 23_040


def run(
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    total: int = 256 * 1024 * 1024,
    repeats: int = 5,
    round_trips: int = 300,
    seed: int = 0,
) -> dict[str, float]:
    """Measure WRITE and READ of `total` bytes in pieces of each size, and one page's round trip.

    Contiguous pieces follow each other on both sides; scattered ones lie in an unrelated random
    order on either side. memcpy copies the same scattered pieces, and the same total in one, inside
    one process.

    Args:
        sizes: bytes of a piece.
        total: bytes of a transfer and of either side's memory.
        repeats: of each figure; the best is reported.
        round_trips: single pages, from `transfer` to the end told by the event callback.

    Returns:
        ``write.contiguous.<size>.ours_gbps`` and ``...memcpy_gbps`` in GB/s, the same for
        ``scattered`` and ``read``, and ``roundtrip_us``, ``roundtrip_p99_us``.
    """
    figures: dict[str, float] = {}
    secret = secrets.token_bytes(32)
    # Not multiprocessing, which would import the caller's main module anew.
    process = subprocess.Popen(
        [sys.executable, "-c", "from pd_transfer.bench import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"secret": secret.hex(), "total": total}) + "\n")
        process.stdin.flush()
        with agent(name="bench-initiator", secret=secret) as initiator:
            memory = np.empty(total, np.uint8)
            memory[:] = (
                np.random.default_rng(seed)
                .integers(0, 256, 4096, np.uint8)
                .repeat(-(-total // 4096))[:total]
            )
            initiator.register_memory(_rows(memory.ctypes.data, total, 1, total), "DRAM")
            target = json.loads(process.stdout.readline())
            initiator.add_remote_agent(bytes.fromhex(target["metadata"]))
            peer = _Peer(initiator, memory, target["address"])
            for size in sizes:
                count = total // size
                rng = np.random.default_rng(seed)
                orders = {
                    "contiguous": (np.arange(count), np.arange(count)),
                    "scattered": (rng.permutation(count), rng.permutation(count)),
                }
                for layout, (local, remote) in orders.items():
                    # What is contiguous, memcpy copies in one piece.
                    memcpy = (
                        _memcpy(memory, count * size, np.zeros(1, int), np.zeros(1, int), repeats)
                        if layout == "contiguous"
                        else _memcpy(memory, size, local, remote, repeats)
                    )
                    for operation in ("WRITE", "READ"):
                        seconds = peer.time(operation, size, local, remote, repeats)
                        name = f"{operation.lower()}.{layout}.{size}"
                        figures[f"{name}.ours_gbps"] = count * size / seconds / 1e9
                        figures[f"{name}.memcpy_gbps"] = count * size / memcpy / 1e9
            trips = peer.round_trips(PAGE, round_trips)
            figures["roundtrip_us"] = statistics.median(trips) * 1e6
            figures["roundtrip_p99_us"] = sorted(trips)[int(len(trips) * 0.99)] * 1e6
    finally:
        process.kill()
        process.communicate()
    return figures


class _Peer:
    def __init__(self, initiator: nixl_agent, memory: npt.NDArray[np.uint8], address: int) -> None:
        self._agent = initiator
        self._memory = memory
        self._address = address
        self._ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
        initiator.set_event_callback(self._ended.put)

    def time(
        self,
        operation: str,
        size: int,
        local: npt.NDArray[np.int64],
        remote: npt.NDArray[np.int64],
        repeats: int,
    ) -> float:
        total = len(self._memory)
        mine = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", _rows(self._memory.ctypes.data, size, total // size, size), "DRAM"
        )
        theirs = self._agent.prep_xfer_dlist(
            "bench-target", _rows(self._address, size, total // size, size), "DRAM"
        )
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            handle = self._agent.make_prepped_xfer(operation, mine, local, theirs, remote)
            self._agent.transfer(handle)
            self._ended.get()
            best = min(best, time.perf_counter() - start)
            assert self._agent.check_xfer_state(handle) == "DONE"
            handle.release()
        return best

    def round_trips(self, size: int, count: int) -> list[float]:
        order = np.zeros(1, np.int64)
        return [self.time("WRITE", size, order, order + i % 8, 1) for i in range(count)]


def _rows(address: int, size: int, count: int, stride: int) -> Rows:
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0] = address + np.arange(count) * stride
    rows[:, 1] = size
    return rows


def _memcpy(
    memory: npt.NDArray[np.uint8],
    size: int,
    source: npt.NDArray[np.int64],
    target: npt.NDArray[np.int64],
    repeats: int,
) -> float:
    """The best time of copying pieces from `memory` to other, warm memory, by numpy."""
    count = len(source)
    pieces = memory[: count * size].reshape(count, size)
    copy = np.zeros_like(pieces)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        if count == 1:
            np.copyto(copy, pieces)
        else:
            copy[target] = pieces[source]
        best = min(best, time.perf_counter() - start)
    return best


def serve() -> None:
    """The target process of `run`: announces itself on stdout, ends with stdin."""
    order = json.loads(sys.stdin.readline())
    memory = np.zeros(order["total"], np.uint8)
    with agent(name="bench-target", secret=bytes.fromhex(order["secret"])) as target:
        target.register_memory(_rows(memory.ctypes.data, memory.nbytes, 1, memory.nbytes), "DRAM")
        answer = {"metadata": target.get_agent_metadata().hex(), "address": memory.ctypes.data}
        print(json.dumps(answer), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name:44} {value:10.3f}")
