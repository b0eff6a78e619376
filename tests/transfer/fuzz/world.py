"""What a link needs around it, without threads, clocks or a network: the fuzzer's world."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from pd_transfer.enums import nixl_mem_t
from pd_transfer.handshake import Probe, Transport
from pd_transfer.link import Link
from pd_transfer.loop import Loop, Progressable, Timer
from pd_transfer.runs import COPIED, view
from pd_transfer.state import State
from pd_transfer.wire import Receiving, Sending, Wire

PAGE: Final = mmap.PAGESIZE
FILL: Final = 0xA5


class Memory:
    """Regions at fixed addresses, so that what the fuzzer learnt of them stays true.

    no access | fringe | region | fringe | region | fringe | no access
               a page    16 pages                             a page each
    """

    REGION: Final = 16 * PAGE

    def __init__(self, address: int) -> None:
        size = 5 * PAGE + 2 * self.REGION
        _map(address, size)
        self._fringes = [
            address + PAGE,
            address + 2 * PAGE + self.REGION,
            address + 3 * PAGE + 2 * self.REGION,
        ]
        for place in (address, address + size - PAGE):
            _protect(place)
        self.regions = [address + 2 * PAGE, address + 3 * PAGE + self.REGION]
        for place in self._fringes:
            view(place, PAGE)[:] = FILL
        self.rows = np.array([(place, self.REGION, 0) for place in self.regions], np.uint64)
        self._clean = bytes([FILL]) * PAGE

    def check(self) -> None:
        for place in self._fringes:
            if ctypes.string_at(place, PAGE) != self._clean:
                raise AssertionError("a write outside of the registered regions")


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED_NOREPLACE: Final = 0x100000


def _map(address: int, size: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    got = _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got != address:
        raise OSError(ctypes.get_errno(), "the fuzzer's memory could not be mapped")


def _protect(address: int) -> None:
    if _libc.mprotect(address, PAGE, 0):
        raise OSError(ctypes.get_errno(), "the fuzzer's memory could not be guarded")


class StillLoop(Loop):
    """A loop without a thread: calls and progress wait for `turn_once`; a defect is raised."""

    def __init__(self) -> None:
        # Not the loop's own, which opens descriptors: there are thousands of these a second.
        self.turn = threading.RLock()
        self.watched: dict[int, Callable[[], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._busy: dict[Progressable, None] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._stopping = False

    def call(self, function: Callable[[], None]) -> bool:
        self._calls.append(function)
        return True

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        assert fd not in self.watched
        self.watched[fd] = handler

    def interest(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        assert fd in self.watched

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        return Timer(call)

    def is_current(self) -> bool:
        return False

    def turn_once(self) -> None:
        self._work()

    def _guarded(self, function: Callable[[], None]) -> None:
        function()


class Wormhole:
    """A socket that ends in the fuzzer's hands."""

    FD: Final = 1_000_000

    def __init__(self) -> None:
        self.coming: deque[bytes] = deque()
        self.sent = bytearray()

    def fileno(self) -> int:
        return self.FD

    def setblocking(self, blocking: bool) -> None:
        pass

    def setsockopt(self, *option: int) -> None:
        pass

    def recv(self, size: int) -> bytes:
        if not self.coming:
            raise BlockingIOError
        return self.coming.popleft()

    def send(self, data: Any) -> int:
        self.sent += data
        return len(data)

    def close(self) -> None:
        pass


class NoUcx(Wire):
    """In the place of UCX's wire: takes jobs, and moves nothing of them."""

    address = b"ucx"
    packing = COPIED

    def __init__(self, loop: Loop, context: Any, broken: Callable[[str], None]) -> None:
        pass

    def connect(self, address: bytes, transport: Transport) -> None:
        pass

    def send(self, job: Sending) -> None:
        pass

    def receive(self, job: Receiving) -> None:
        pass

    def stop_sending(self, job: Sending) -> None:
        pass

    def stop_receiving(self, job: Receiving, limit: int) -> None:
        pass

    def destroy(self) -> None:
        pass


class Owner:
    """The backend of one link."""

    def __init__(self, memory: Memory, loop: StillLoop) -> None:
        self.state = State("victim", generation=bytes(16))
        self.state.regions.add(nixl_mem_t.DRAM_SEG, memory.rows)
        self.loop = loop
        self.probe = Probe()
        self.transport = Transport.CROSS_MEMORY
        self.fabric = Transport.TCP

    def context(self, transport: Transport) -> Any:
        return SimpleNamespace()

    def opened(self, link: Link) -> None:
        pass

    def lost(self, link: Link, error: Exception) -> None:
        link.close(error)

    def forget(self, link: Link) -> None:
        link.close(RuntimeError("forgotten"))

    def ticketed(self, ticket: bytes) -> Any:
        return None
