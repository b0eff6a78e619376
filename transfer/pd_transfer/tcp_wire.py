"""The bulk data of one peer through a TCP connection of its own, between hosts without RDMA.

Pages go from where they lie into the socket and out of it to where they belong, many scattered runs
by one system call, with the GIL released: no staging, no per-run Python work. Every message has a
header that names it, so transfers take turns, a message each.

      header   | runs ...          | header | runs ...
      24 bytes | plan[index].nbytes

What is read lands only in the runs of a `Receiving`, which lie in memory that is held for it; after
`destroy` the socket is closed, and nothing can land. The sender is done with a message once the
kernel has copied it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from pd_transfer.loop import Loop
from pd_transfer.regions import Vector
from pd_transfer.runs import IN_PLACE, OWN_MESSAGE, Message
from pd_transfer.wire import Receiving, Sending, Wire

# Magic, place in the plan, id of the transfer, bytes that follow.
_HEADER: Final = struct.Struct("<4sIQQ")
_MAGIC: Final = b"PDT1"
# The kernel's UIO_MAXIOV.
_PIECES: Final = 1024
# What one turn of the loop moves at most: the thread cannot be spoken to meanwhile.
_STEP: Final = 16 * 1024 * 1024
_SCRATCH: Final = 256 * 1024
# Of a message under way, so much has arrived before the thread is woken for more: for less, waking
# up costs more than reading; for more, the socket runs full (bench.py, with --namespaces).
_CHUNK: Final = 192 * 1024
# Bytes under way to a peer nearby; the kernel takes twice as many. What waits is then read out of
# a core's cache; of the 4 MiB to which the kernel lets it grow, most is in memory again by then,
# and everything takes nearly twice as long.
_UNDER_WAY: Final = 384 * 1024
# A peer farther away needs more under way than that to fill 100 Gbit/s.
_NEARBY: Final = 2 * _UNDER_WAY / 12.5e9
# Of Linux's struct tcp_info: the shortest round trip seen, us, of the packets alone.
_MIN_RTT: Final = struct.Struct("=148xI")


class _Vectored(ctypes.Structure):
    """struct msghdr"""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


_libc: Final = ctypes.CDLL(None, use_errno=True)
_sendmsg: Final = _libc.sendmsg
_recvmsg: Final = _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]


class _Pieces:
    """(P, 2) uint64 iovecs, gone through in order by system calls that may stop anywhere."""

    def __init__(self, table: npt.NDArray[np.uint64]) -> None:
        self._table = table
        self._ends = np.cumsum(table[:, 1]).astype(np.int64)
        self._first = 0
        self._done = 0
        self._header = _Vectored()

    @property
    def left(self) -> int:
        return int(self._ends[-1]) - self._done

    @property
    def done(self) -> int:
        return self._done

    def move(self, call: Callable[[int, int, int], int], fd: int, flags: int) -> int:
        """One system call.

        Returns:
            The bytes that it moved; 0 at the end of the stream.

        Raises:
            BlockingIOError: none for now.
            OSError: the connection is broken.
        """
        header = self._header
        header.pieces = self._table.ctypes.data + self._first * 16
        header.count = min(_PIECES, len(self._table) - self._first)
        count = call(fd, ctypes.addressof(header), flags)
        if count < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                return self.move(call, fd, flags)
            raise OSError(code, os.strerror(code))
        self._done += count
        first = int(np.searchsorted(self._ends, self._done, side="right"))
        if first < len(self._table):
            row = self._table[first]
            rest = int(self._ends[first]) - self._done
            row[0] += np.uint64(int(row[1]) - rest)
            row[1] = rest
        self._first = first
        return count


def _runs(addresses: Vector, lengths: Vector, message: Message) -> npt.NDArray[np.uint64]:
    """(P, 2) iovecs of a message on this side."""
    table = np.empty((message.last - message.first, 2), np.uint64)
    table[:, 0] = addresses[message.first : message.last]
    table[:, 1] = lengths[message.first : message.last]
    if len(table) == 1:
        table[0] = (int(table[0, 0]) + message.offset, message.nbytes)
    return table


def _round_trip(sock: socket.socket) -> float:
    """Seconds; infinity where the kernel does not say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        (shortest,) = _MIN_RTT.unpack(info)
    except (OSError, struct.error):  # no TCP, or a kernel that tells less
        return math.inf
    return float(shortest) / 1e6


class TcpWire(Wire):
    """
    Args:
        broken: called, once, when the connection ends or carries nonsense.
    """

    packing = IN_PLACE

    def __init__(self, loop: Loop, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._broken = broken
        self._sock: socket.socket | None = None
        self._fd = -1
        self._to_send: deque[Sending] = deque()
        self._out: tuple[Sending, _Pieces] | None = None
        self._out_header = np.empty(_HEADER.size, np.uint8)
        self._expected: dict[int, Receiving] = {}
        self._latest = 0
        self._in_header = np.zeros(_HEADER.size, np.uint8)
        self._scratch: npt.NDArray[np.uint8] | None = None
        # What is being read: the rest of a message, and the header of the next.
        self._in, self._payload = self._next_header(), 0
        self._job: Receiving | None = None
        # A header whose transfer has not been announced yet: the announcement is on its way.
        self._held = False
        self._chunk = 1
        # A turn has ended with more to do.
        self._more = False
        self._writable_wanted = False

    def attach(self, sock: socket.socket) -> None:
        """The connection, authenticated; both sides have it before the first transfer."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _round_trip(sock) <= _NEARBY:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNDER_WAY)
        self._sock, self._fd = sock, sock.fileno()
        self._loop.watch(self._fd, self._ready)

    def send(self, job: Sending) -> None:
        if not job.plan:
            job.on_idle()
            return
        self._to_send.append(job)
        if self._out is None:
            self._flush()
            if self._more:
                self._loop.busy(self)

    def receive(self, job: Receiving) -> None:
        self._latest = job.id
        if job.done:
            job.on_done()
            return
        self._expected[job.id] = job
        if self._held:
            self._held = False
            self._watch()
            self._loop.busy(self)

    def stop_sending(self, job: Sending) -> None:
        if job.finished:
            return
        job.stopped = True
        if job in self._to_send:
            self._to_send.remove(job)
        if job.idle:
            job.on_idle()

    def stop_receiving(self, job: Receiving, limit: int) -> None:
        ended = job.done
        if ended:
            return
        job.limit = limit
        job.discard = True
        if job.done:
            del self._expected[job.id]
            job.on_done()

    def progress(self) -> bool:
        self._move()
        return not self._more

    def destroy(self) -> None:
        self._loop.idle(self)
        self._to_send.clear()
        self._expected.clear()
        self._out = None
        if self._sock is not None:
            self._loop.unwatch(self._fd)
            self._sock.close()
            self._sock = None

    def _ready(self) -> None:
        self._move()
        if self._more:
            self._loop.busy(self)

    def _move(self) -> None:
        self._more = False
        try:
            if self._out is not None:
                self._flush()
            self._read()
        except OSError as error:
            if self._sock is not None:
                self._broken(f"data connection lost: {error}")

    def _watch(self) -> None:
        self._loop.interest(self._fd, readable=not self._held, writable=self._writable_wanted)

    def _want_writable(self, wanted: bool) -> None:
        if wanted != self._writable_wanted:
            self._writable_wanted = wanted
            self._watch()

    # Sending.

    def _flush(self) -> None:
        """
        Raises:
            OSError: the connection is broken.
        """
        moved = 0
        while self._sock is not None and (self._out is not None or self._to_send):
            if self._out is None:
                self._out = self._next_message()
            job, pieces = self._out
            if moved >= _STEP:
                self._more = True
                return
            try:
                moved += pieces.move(_sendmsg, self._fd, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._want_writable(True)
                return
            except OSError:
                # Told by reading, so that what the peer sent before is seen first.
                return
            if not pieces.left:
                self._out = None
                job.in_flight -= 1
                if not job.finished:
                    self._to_send.append(job)
                elif job.idle:
                    job.on_idle()
        if self._sock is not None:
            self._want_writable(False)

    def _next_message(self) -> tuple[Sending, _Pieces]:
        job = self._to_send.popleft()
        message = job.plan[job.next]
        header = _HEADER.pack(_MAGIC, job.next, job.id, message.nbytes)
        self._out_header[:] = np.frombuffer(header, np.uint8)
        own = np.array([[self._out_header.ctypes.data, _HEADER.size]], np.uint64)
        job.next += 1
        job.in_flight += 1
        return job, _Pieces(np.concatenate([own, _runs(job.addresses, job.lengths, message)]))

    # Receiving.

    def _next_header(self) -> _Pieces:
        return _Pieces(np.array([[self._in_header.ctypes.data, _HEADER.size]], np.uint64))

    def _read(self) -> None:
        """
        Raises:
            OSError: the connection is broken or has ended.
        """
        moved = 0
        while self._sock is not None:
            if not self._in.left and not self._held:
                self._header_read()
            try:
                # What is held is not read on, but a reset is noticed, which would wake us for ever;
                # an end that has data before it is told by the control connection.
                if self._held:
                    if self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise ConnectionError("reset")
                    if not self._sock.recv(1, socket.MSG_PEEK):
                        raise ConnectionError("closed")
                    return
                count = self._in.move(_recvmsg, self._fd, 0)
            except BlockingIOError:
                self._wait_for(min(_CHUNK, max(1, self._payload - self._in.done)))
                return
            if not count:
                raise ConnectionError("closed")
            moved += count
            if self._job is not None and self._in.done >= self._payload:
                self._message_read(self._job)
            if moved >= _STEP:
                self._more = True
                return

    def _wait_for(self, chunk: int) -> None:
        """Be woken by so many bytes, or by the end."""
        if chunk != self._chunk:
            assert self._sock is not None
            self._chunk = chunk
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, chunk)

    def _message_read(self, job: Receiving) -> None:
        self._job = None
        job.in_flight -= 1
        if job.done:
            del self._expected[job.id]
            job.on_done()

    def _header_read(self) -> None:
        magic, index, id, nbytes = _HEADER.unpack(self._in_header.tobytes())
        job = self._expected.get(id)
        if job is None and magic == _MAGIC and id > self._latest:
            self._held = True
            self._watch()
            return
        if magic != _MAGIC or job is None or job.finished or index != job.next:
            raise ConnectionError("a message that was not expected")
        if not 0 < nbytes <= OWN_MESSAGE or not (job.discard or nbytes == job.plan[index].nbytes):
            raise ConnectionError("a message of another length")
        if job.discard:
            pieces = self._nowhere(nbytes)
        else:
            pieces = _runs(job.addresses, job.lengths, job.plan[index])
        self._job, self._payload = job, nbytes
        own = np.array([[self._in_header.ctypes.data, _HEADER.size]], np.uint64)
        self._in = _Pieces(np.concatenate([pieces, own]))
        job.next += 1
        job.in_flight += 1

    def _nowhere(self, nbytes: int) -> npt.NDArray[np.uint64]:
        if self._scratch is None:
            self._scratch = np.empty(_SCRATCH, np.uint8)
        lengths = np.full(-(-nbytes // _SCRATCH), _SCRATCH, np.uint64)
        lengths[-1] = nbytes - _SCRATCH * (len(lengths) - 1)
        return np.stack([np.full_like(lengths, self._scratch.ctypes.data), lengths], axis=1)
