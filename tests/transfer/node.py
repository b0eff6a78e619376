"""An agent with a page pool, in this process or (run as a script) at the end of a pipe."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_transfer import agent, nixl_agent

PAGE = 1536
PAGES = 64


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until the condition is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {condition}")
        time.sleep(0.001)
    return value


def rows(memory: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint64]:
    count = memory.nbytes // size
    table = np.zeros((count, 3), np.uint64)
    table[:, 0] = memory.ctypes.data + np.arange(count) * size
    table[:, 1] = size
    return table


class Node:
    """An agent that has registered `pages` pages, filled with bytes drawn from `seed`."""

    kind = "DRAM"

    def __init__(
        self, made: nixl_agent, pages: int = PAGES, page: int = PAGE, seed: int = 0
    ) -> None:
        self.agent = made
        self.page = page
        self.memory = np.random.default_rng(seed).integers(0, 256, pages * page, np.uint8)
        self.registered = made.get_reg_descs(
            [(self.address(), self.memory.nbytes, 0, "pool")], self.kind
        )
        made.register_memory(self.registered)

    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def metadata(self) -> bytes:
        return self.agent.get_agent_metadata()

    def content(self) -> bytes:
        return self.memory.tobytes()

    def fill(self, seed: int) -> None:
        """With bytes drawn from `seed`."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, len(self.memory), np.uint8)

    def digest(self) -> str:
        """Of `content`, for much memory at the end of a pipe."""
        return hashlib.sha256(self.content()).hexdigest()

    def notifications(self) -> dict[str, list[bytes]]:
        return self.agent.get_new_notifs()

    def deregister(self) -> None:
        self.agent.deregister_memory(self.registered)

    def register(self) -> None:
        self.agent.register_memory(self.registered)

    def counters(self) -> dict[str, int]:
        return vars(self.agent.statistics())

    def add(self, metadata: bytes) -> None:
        self.agent.add_remote_agent(metadata)

    def remove(self, name: str) -> None:
        self.agent.remove_remote_agent(name)

    def send(self, name: str, message: bytes) -> None:
        self.agent.send_notif(name, message)

    def state(self, name: str) -> str:
        return self.agent.peer_state(name)

    def quiet(self, name: str) -> bool:
        return self.agent.peer_is_quiet(name)

    def write_everything(self, name: str, address: int, nbytes: int) -> None:
        """Post one WRITE of all memory and let it run."""
        mine = self.agent.prep_xfer_dlist("", [(self.address(), nbytes, 0)], self.kind)
        theirs = self.agent.prep_xfer_dlist(name, [(address, nbytes, 0)], self.kind)
        self.handle = self.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
        self.agent.transfer(self.handle)

    def fork_a_child(self) -> int:
        """A child that holds all our sockets open and outlives us."""
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    def kill(self) -> None:
        self.agent.close()

    close = kill


class DeviceNode(Node):
    """A `Node` whose pages are a GPU's; `memory` is a copy of what was last read or filled in."""

    kind = "VRAM"

    def __init__(
        self, made: nixl_agent, pages: int = PAGES, page: int = PAGE, seed: int = 0
    ) -> None:
        from pd_transfer.cuda import device_memory

        self.device = device_memory(0)
        place = ctypes.c_ulonglong()
        with self.device.current():
            self.device._do("cuMemAlloc_v2", ctypes.byref(place), pages * page)
        self._place = place.value
        super().__init__(made, pages, page, seed)
        self._copy(self.memory.ctypes.data, self._place)

    def _copy(self, source: int, target: int) -> None:
        one = [np.array([value], np.uint64) for value in (source, target, self.memory.nbytes)]
        self.device.copy(*one)

    def address(self) -> int:
        return self._place

    def content(self) -> bytes:
        self._copy(self._place, self.memory.ctypes.data)
        return super().content()

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self._copy(self.memory.ctypes.data, self._place)

    def driven(self) -> dict[str, int]:
        """What the stub of a driver has counted."""
        library = ctypes.CDLL("libcuda.so.1")
        names = ("copies", "read_from_others", "written_to_others")
        return {name: ctypes.c_ulong.in_dll(library, f"stub_{name}").value for name in names}


def load_stub(folder: str) -> None:
    """Let this process find these libraries where it looks for the GPU's driver."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(Path(folder) / name))


class RemoteNode:
    """A `Node` in another process: the same methods, called through its pipes."""

    def __init__(self, prefix: Sequence[str] = (), **settings: Any) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "error", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._address = self._call("open", settings)

    def address(self) -> int:
        return int(self._address)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._call(method, *args)

    def _call(self, method: str, *args: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, _plain(args)]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return _rich(answer["value"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        if "hex" in value:
            return bytes.fromhex(value["hex"])
        return {key: _rich(item) for key, item in value["dict"].items()}
    if isinstance(value, list):
        return [_rich(item) for item in value]
    return value


def _open(
    name: str,
    secret: bytes,
    options: dict[str, Any],
    kind: str = "DRAM",
    stub: str = "",
    **shape: int,
) -> Node:
    if stub:
        load_stub(stub)
    from pd_transfer.ucx import UcxOptions

    made = agent("ucx", name=name, secret=secret or None, options=UcxOptions(**options))
    return (DeviceNode if kind == "VRAM" else Node)(made, **shape)


def _serve() -> None:
    node = None
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            method, args = json.loads(line)
            args = _rich(args)
            try:
                if method == "open":
                    node = _open(**args[0])
                    value: Any = node.address()
                else:
                    value = getattr(node, method)(*args)
                answer = {"value": _plain(value)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


def closing() -> Iterator[Callable[[Any], Any]]:
    """Collects things that have `close`, and closes the latest first."""
    with contextlib.ExitStack() as stack:

        def later(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        yield later


if __name__ == "__main__":
    _serve()
