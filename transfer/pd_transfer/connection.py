"""One control connection: frames over a non-blocking TCP socket."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from pd_transfer.loop import Loop
from pd_transfer.messages import (
    HEADER,
    PEER_FRAME,
    STRANGER_FRAME,
    Message,
    ProtocolError,
    decode,
    encode,
)
from pd_transfer.spin import Spin

# Of what malloc hands out quickly: 256 KiB would be mapped and unmapped for every message.
_READ: Final = 64 * 1024


class Connection:
    """Calls `received` for each message and `closed` once, with why.

    In the loop's thread, but for `send` and `take_here`, which any may call.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        received: Callable[[Message, bytes], None],
        closed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._received = received
        self._closed = closed
        self._in = bytearray()
        self._out = bytearray()
        self._limit = STRANGER_FRAME
        self._waiting_to_write = False
        self._taken_elsewhere = False
        self._lock = threading.Lock()
        self.open = True
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that loses power sends no end of file. Its kernel answers these probes even while
        # the process is stopped, so a stopped peer is not taken for a dead one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._readable = select.poll()
        self._readable.register(sock.fileno(), select.POLLIN)
        self._spin = Spin()
        loop.watch(sock.fileno(), self._ready)

    def trust(self) -> None:
        """The peer has proved itself: allow it long frames."""
        self._limit = PEER_FRAME

    def send(self, message: Message) -> bytes:
        """Send now or when the socket takes it. Returns the encoded message."""
        body = encode(message)
        frame = HEADER.pack(len(body)) + body
        with self._lock:
            if self.open:
                self._out += frame
                self._flush()
        return body

    def take_here(self, milliseconds: int, needless: Callable[[], bool]) -> bool:
        """Wait for what comes next and handle it in this thread; the loop's is not woken for it.

        Args:
            needless: what is waited for has happened already; asked while nothing can happen.

        Returns:
            False if that cannot be: another thread does so, or the loop's is at work.
        """
        turn = self._loop.turn
        if not turn.acquire(blocking=False):
            return False
        try:
            if not self.open or self._taken_elsewhere or self._loop.is_current():
                return False
            if needless():
                return True
            self._take_elsewhere(True)
        finally:
            turn.release()
        poll = self._readable.poll
        self._spin.wait(lambda: poll(0), lambda: poll(milliseconds))
        with turn:
            if self.open:
                self._loop.stand_in(self._read)
            # Last, for readiness would wake the loop's thread.
            self._take_elsewhere(False)
        return True

    def _take_elsewhere(self, elsewhere: bool) -> None:
        with self._lock:
            self._taken_elsewhere = elsewhere
            if self.open:
                self._watch()

    def _watch(self) -> None:
        self._loop.interest(
            self._sock.fileno(),
            readable=not self._taken_elsewhere,
            writable=self._waiting_to_write,
        )

    def close(self) -> None:
        """Close without calling `closed`."""
        with self._lock:
            if self.open:
                self.open = False
                self._loop.unwatch(self._sock.fileno())
                self._sock.close()

    def detach(self) -> socket.socket:
        """Give the socket away, with nothing read of what follows the message just received.

        Raises:
            ProtocolError: something had followed already.
        """
        with self._lock:
            if self._in or self._out:
                raise ProtocolError("more than was asked for")
            self.open = False
            self._loop.unwatch(self._sock.fileno())
        return self._sock

    def _fail(self, reason: str) -> None:
        if self.open:
            self.close()
            self._closed(reason)

    def _ready(self) -> None:
        if self._waiting_to_write:
            with self._lock:
                self._flush()
        if self.open:
            self._read()

    def _flush(self) -> None:
        """With the lock held."""
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            # Not closed here: the caller may be amid its own work, and what the peer sent before
            # is still to be read. The socket's readiness tells of the error again.
            self._out.clear()
        if bool(self._out) != self._waiting_to_write:
            self._waiting_to_write = bool(self._out)
            self._watch()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"connection lost: {error}")
            return
        if not data:
            self._fail("connection closed")
            return
        try:
            if not self._in and self._is_frame(data):  # the common case: its latency counts
                body = data[HEADER.size :]
                self._received(decode(body), body)
                return
            self._in += data
            self._frames()
        except ProtocolError as error:
            self._fail(str(error))

    def _is_frame(self, data: bytes) -> bool:
        """Whether it is one frame, whole."""
        if len(data) < HEADER.size:
            return False
        (length,) = HEADER.unpack_from(data)
        return bool(length == len(data) - HEADER.size and length <= self._limit)

    def _frames(self) -> None:
        while self.open and len(self._in) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._in)
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._in) < end:
                return
            body = bytes(memoryview(self._in)[HEADER.size : end])
            del self._in[:end]
            self._received(decode(body), body)
