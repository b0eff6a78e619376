"""Copies straight out of another process's memory, on one host: no staging, no further messages.

The side that the bytes go to does the copying, by `process_vm_readv` in its agent's own thread: one
system call takes up to 1,024 scattered pieces. Nobody ever writes into another process, so whatever
happens to the peer, nothing lands once a job has been dropped here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from pd_transfer.errors import nixlBackendError
from pd_transfer.loop import Loop
from pd_transfer.regions import Vector

# The kernel's UIO_MAXIOV.
_PIECES: Final = 1024
# What one system call moves at most: the thread cannot be spoken to meanwhile, about 2 ms.
_STEP: Final = 16 * 1024 * 1024
_IOVEC: Final = struct.Struct("=QQ")

# With the GIL released. A plain CDLL function cannot be given a void* as an int without argtypes.
_read: Final = ctypes.CDLL(None, use_errno=True).process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class PeerEnded(Exception):
    """The process that was to be read from is no longer there."""


def read_memory(pid: int, local: bytes | int, remote: bytes | int, count: int) -> int:
    """Copy pieces of process `pid`'s memory into as many of ours, in order.

    Args:
        local: `count` iovecs (uint64 address, bytes), or where they are; `remote` likewise.

    Returns:
        The bytes copied, at least 1; fewer than asked for if a later piece cannot be read.

    Raises:
        PeerEnded: no such process.
        nixlBackendError: the first piece is not mapped on one side, or tracing is forbidden.
    """
    copied: int = _read(pid, local, count, remote, count, 0)
    if copied > 0:
        return copied
    code = ctypes.get_errno() if copied < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise PeerEnded
    raise nixlBackendError(f"cannot read process {pid}: {os.strerror(code)}")


class Copy:
    """One transfer's bytes on their way here. `ended` is called once, unless it is cancelled."""

    def __init__(
        self,
        local: Vector,
        remote: Vector,
        lengths: Vector,
        ended: Callable[[Exception | None], None],
    ) -> None:
        self.ended = ended
        self._runs = local, remote, lengths
        self._tables: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
        self._next = 0

    def step(self, pid: int) -> bool:
        """Copy one portion; True when that was the last."""
        if self._tables is None:
            local, remote, lengths = self._runs
            # A page alone: its latency counts. What is not read whole is tried again below.
            if len(lengths) == 1 and (nbytes := int(lengths[0])) <= _STEP:
                here, there = _IOVEC.pack(local[0], nbytes), _IOVEC.pack(remote[0], nbytes)
                if read_memory(pid, here, there, 1) == nbytes:
                    return True
            self._tables = _pieces(local, remote, lengths)
        return self._step(pid, *self._tables)

    def _step(
        self, pid: int, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]
    ) -> bool:
        start = self._next
        if start == len(local):
            return True
        stop = min(start + _PIECES, len(local))
        wanted = int(local[start:stop, 1].sum())
        while wanted > _STEP and stop > start + 1:
            stop = start + max(1, (stop - start) * _STEP // wanted)
            wanted = int(local[start:stop, 1].sum())
        done = read_memory(pid, local[start:].ctypes.data, remote[start:].ctypes.data, stop - start)
        if done < wanted:  # the rest of the piece it stopped in is tried again, and raises
            ends = np.cumsum(local[start:stop, 1])
            stop = start + int(np.searchsorted(ends, done, side="right"))
            part = np.uint64(done - (int(ends[stop - start - 1]) if stop > start else 0))
            for side in (local, remote):
                side[stop, 0] += part
                side[stop, 1] -= part
        self._next = stop
        return stop == len(local)


def _pieces(
    local: Vector, remote: Vector, lengths: Vector
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """(P, 2) iovecs of either side, no piece longer than a step."""
    if len(lengths) and int(lengths.max()) > _STEP:
        parts = -(-lengths.astype(np.int64) // _STEP)
        run = np.repeat(np.arange(len(lengths)), parts)
        first = np.repeat(np.cumsum(parts) - parts, parts)
        offsets = ((np.arange(len(run)) - first) * _STEP).astype(np.uint64)
        local, remote = local[run] + offsets, remote[run] + offsets
        lengths = np.minimum(lengths[run] - offsets, np.uint64(_STEP))
    table = np.empty((2, len(lengths), 2), np.uint64)
    table[0, :, 0], table[1, :, 0], table[:, :, 1] = local, remote, lengths
    return table[0], table[1]


class Copier:
    """The copies from one peer, a portion of each in turn. In the loop's thread only.

    Args:
        pidfd: of process `pid`, -1 for this one. It tells that the bytes were still that
            process's, and not of another one that was given its number.
        broken: called, once, when the process has ended.
    """

    def __init__(self, loop: Loop, pid: int, pidfd: int, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._pid = pid
        self._alive = select.poll()
        if pidfd >= 0:
            self._alive.register(pidfd, select.POLLIN)
        self._broken = broken
        self._jobs: deque[Copy] = deque()

    def add(self, job: Copy) -> None:
        self._jobs.append(job)
        # At once: a page alone, the common case, ends here without another turn of the loop.
        if len(self._jobs) > 1 or not self.progress():
            self._loop.busy(self)

    def cancel(self, job: Copy) -> bool:
        """False if it is not under way. Nothing more of it lands."""
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        return True

    def progress(self) -> bool:
        if not self._jobs:
            return True
        job = self._jobs.popleft()
        error: Exception | None = None
        try:
            if not job.step(self._pid):
                self._jobs.append(job)
                return False
            if self._alive.poll(0):
                raise PeerEnded
        except PeerEnded:
            self._jobs.appendleft(job)
            self._broken("process ended")
            return True
        except nixlBackendError as failure:
            error = failure
        job.ended(error)
        return not self._jobs

    def destroy(self) -> None:
        """Nothing lands after this. Jobs under way end without being called back."""
        self._jobs.clear()
        self._loop.idle(self)
