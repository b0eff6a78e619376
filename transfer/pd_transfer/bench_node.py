"""One process of the bench: the initiator or the target, on ours or on the `nixl` wheel.

Run as a script, because the wheel may live in another environment than ours and must live in
another process. Orders come as JSON lines on stdin, answers go to stdout. The same code runs on
both libraries: what it uses is NIXL's API.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt


def rows(address: int, size: int, count: int) -> npt.NDArray[np.uint64]:
    table = np.zeros((count, 3), np.uint64)
    table[:, 0] = address + np.arange(count) * size
    table[:, 1] = size
    return table


def make_agent(library: str, name: str, options: dict[str, Any]) -> Any:
    if library == "nixl":
        from nixl_cu12._api import (  # type: ignore[import-not-found, unused-ignore]
            nixl_agent,
            nixl_agent_config,
        )

        return nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    from pd_transfer import agent
    from pd_transfer.ucx import UcxOptions

    return agent("ucx", name=name, secret=b"of the bench", options=UcxOptions(**options))


class Node:
    def __init__(self, library: str, role: str, total: int, options: dict[str, Any]) -> None:
        self.memory = np.full(total, 1 if role == "initiator" else 0, np.uint8)
        self.agent = make_agent(library, f"bench-{role}", options)
        self.agent.register_memory([(self.memory.ctypes.data, total, 0, "")], "DRAM")
        self._sides: dict[int, tuple[Any, Any]] = {}
        self._stop = threading.Event()
        self._burner: threading.Thread | None = None

    # The target's orders.

    def hello(self) -> dict[str, Any]:
        return {
            "metadata": self.agent.get_agent_metadata().hex(),
            "address": self.memory.ctypes.data,
        }

    def cpu(self) -> float:
        """Seconds that all threads of this process have computed so far."""
        return time.process_time()

    def drain(self) -> None:
        self.agent.get_new_notifs()

    # The initiator's.

    def meet(self, metadata: str, address: int) -> None:
        self.agent.add_remote_agent(bytes.fromhex(metadata))
        self._there = address
        # Connected for good before both are stopped: half-way, the target would give up.
        self.trips(64, 1)

    def move(self, operation: str, size: int, order: str, repeats: int, seed: int) -> list[float]:
        """Seconds of each: a handle made of two prepared lists, posted, and done."""
        count = len(self.memory) // size
        if size not in self._sides:
            self._sides[size] = (
                self.agent.prep_xfer_dlist(
                    "NIXL_INIT_AGENT", rows(self.memory.ctypes.data, size, count), "DRAM"
                ),
                self.agent.prep_xfer_dlist("bench-target", rows(self._there, size, count), "DRAM"),
            )
        local, remote = orders(order, count, seed)
        return [self._once(operation, *self._sides[size], local, remote) for _ in range(repeats)]

    def trips(self, size: int, count: int) -> list[float]:
        mine = self.agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", rows(self.memory.ctypes.data, size, 8), "DRAM"
        )
        theirs = self.agent.prep_xfer_dlist("bench-target", rows(self._there, size, 8), "DRAM")
        zero = np.zeros(1, np.int32)
        return [
            self._once("WRITE", mine, theirs, zero, zero + i % 8, b"arrived") for i in range(count)
        ]

    def post(self, size: int, count: int, repeats: int) -> list[float]:
        """Seconds that making and posting `count` scattered descriptors takes its caller."""
        mine, theirs = (
            self.agent.prep_xfer_dlist(agent, rows(address, size, count), "DRAM")
            for agent, address in (
                ("NIXL_INIT_AGENT", self.memory.ctypes.data),
                ("bench-target", self._there),
            )
        )
        local, remote = orders("scattered", count, 1)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            handle = self.agent.make_prepped_xfer("WRITE", mine, local, theirs, remote)
            self.agent.transfer(handle)
            seconds.append(time.perf_counter() - start)
            self._wait(handle)
        return seconds

    def _once(
        self, operation: str, mine: Any, theirs: Any, local: Any, remote: Any, message: bytes = b""
    ) -> float:
        start = time.perf_counter()
        handle = self.agent.make_prepped_xfer(operation, mine, local, theirs, remote, message)
        if self.agent.transfer(handle) != "DONE":
            self._wait(handle)
        seconds = time.perf_counter() - start
        self.agent.release_xfer_handle(handle)
        return seconds

    def _wait(self, handle: Any) -> None:
        while (state := self.agent.check_xfer_state(handle)) != "DONE":
            assert state == "PROC"


class _SocketNode:
    """One plain socket between the two: a yardstick. Of each message its length is told first."""

    def __init__(self, library: str, role: str, total: int, options: dict[str, Any]) -> None:
        self._host = options["host"]

    def hello(self) -> dict[str, Any]:
        self._listener = socket.create_server((self._host, 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return {"metadata": self._host, "address": self._listener.getsockname()[1]}

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while length := sock.recv(8, socket.MSG_WAITALL):
            self._take(sock, int.from_bytes(length, "little"))
            sock.sendall(b"!")

    def _take(self, sock: socket.socket, count: int) -> None:
        raise NotImplementedError

    def meet(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TcpNode(_SocketNode):
    """The yardstick between hosts: the same bytes through one plain socket, acknowledged."""

    def __init__(self, library: str, role: str, total: int, options: dict[str, Any]) -> None:
        super().__init__(library, role, total, options)
        self.memory = np.full(total, 1, np.uint8)

    def _take(self, sock: socket.socket, count: int) -> None:
        done = 0
        while done < count:
            done += sock.recv_into(self.memory.data[done:count])

    def move(self, operation: str, size: int, order: str, repeats: int, seed: int) -> list[float]:
        seconds = []
        count = len(self.memory) // size * size
        for _ in range(repeats):
            start = time.perf_counter()
            self._socket.sendall(count.to_bytes(8, "little"))
            self._socket.sendall(self.memory.data[:count])
            self._socket.recv(1)
            seconds.append(time.perf_counter() - start)
        return seconds

    def cpu(self) -> float:
        return time.process_time()


class EchoNode(_SocketNode):
    """The yardstick of a round trip: a page through a plain socket and a byte back.

    As many threads are woken for it as for a transfer: one at the target, and the caller.
    """

    def _take(self, sock: socket.socket, count: int) -> None:
        sock.recv(count, socket.MSG_WAITALL)

    def trips(self, size: int, count: int) -> list[float]:
        page = size.to_bytes(8, "little") + bytes(size)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._socket.sendall(page)
            self._socket.recv(1)
            seconds.append(time.perf_counter() - start)
        return seconds

    def drain(self) -> None:
        """Nothing has been kept."""


KINDS = {"tcp": TcpNode, "echo": EchoNode}


def orders(order: str, count: int, seed: int) -> tuple[Any, Any]:
    """Indices on either side: in sequence, or in unrelated random orders."""
    if order == "contiguous":
        return np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)
    rng = np.random.default_rng(seed)
    return rng.permutation(count).astype(np.int32), rng.permutation(count).astype(np.int32)


def main() -> None:
    orders_in: list[str] = []
    arrived = threading.Condition()

    def read() -> None:
        for line in itertools.chain(sys.stdin, [""]):
            with arrived:
                orders_in.append(line)
                arrived.notify()

    node: Any = None
    threading.Thread(target=read, daemon=True).start()
    burning = False
    matrix = np.ones((512, 512), np.float32)
    while True:
        with arrived:
            while not orders_in and not burning:
                arrived.wait()
            line = orders_in.pop(0) if orders_in else None
        if line is None:  # a model step in the main thread, while the agent serves
            matrix @ matrix
            continue
        if not line:
            return
        name, arguments = json.loads(line)
        answer = None
        if name == "open":
            node = KINDS.get(arguments[0], Node)(*arguments)
        elif name == "burn":
            burning = arguments[0]
        else:
            answer = getattr(node, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
