"""Connecting without waiting, and joining a data connection to its link.

Both ends of a data connection prove that they know the secret, over a ticket that the acceptor gave
out in the link's handshake.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
from collections.abc import Callable
from typing import Final

from pd_transfer.loop import Loop
from pd_transfer.messages import HEADER, Attach, encode

DATA_PROOF: Final = 32


class Dialing:
    """A TCP connection in the making. `done` or `failed` is called once, unless it is cancelled."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        done: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._address = address
        self._done = done
        self._failed = failed
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._sock: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._sock.setblocking(False)

    def start(self) -> None:
        assert self._sock is not None
        self._loop.watch(self._sock.fileno(), self._ready)
        failure = self._sock.connect_ex(self._address)
        if failure not in (0, errno.EINPROGRESS):
            self._fail(os.strerror(failure))
        else:
            self._loop.interest(self._sock.fileno(), writable=True)

    def cancel(self) -> None:
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _ready(self) -> None:
        assert self._sock is not None
        failure = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._fail(os.strerror(failure))
            return
        sock, self._sock = self._sock, None
        self._loop.unwatch(sock.fileno())
        self._done(sock)

    def _fail(self, reason: str) -> None:
        self.cancel()
        self._failed(f"cannot connect: {reason}")


def proof(secret: bytes, role: bytes, ticket: bytes) -> bytes:
    """DATA_PROOF bytes."""
    return hmac.digest(secret, b"data of the " + role + ticket, "sha256")


class Attaching:
    """The dialer's side of a data connection. `done` or `failed` is called once, or it is
    cancelled."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        secret: bytes,
        ticket: bytes,
        done: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._secret = secret
        self._ticket = ticket
        self._done = done
        self._failed = failed
        self._sock: socket.socket | None = None
        self._answer = b""
        self._dialing = Dialing(loop, address, self._connected, failed)
        self._dialing.start()

    def cancel(self) -> None:
        self._dialing.cancel()
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _connected(self, sock: socket.socket) -> None:
        self._sock = sock
        body = encode(Attach(self._ticket, proof(self._secret, b"dialer", self._ticket)))
        self._loop.watch(sock.fileno(), self._readable)
        try:
            sock.send(HEADER.pack(len(body)) + body)  # a fresh socket's buffer takes it whole
        except OSError as error:
            self._fail(str(error))

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            part = self._sock.recv(DATA_PROOF - len(self._answer))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(str(error))
            return
        self._answer += part
        if not part:
            self._fail("closed")
        elif len(self._answer) == DATA_PROOF:
            expected = proof(self._secret, b"acceptor", self._ticket)
            if not hmac.compare_digest(self._answer, expected):
                self._fail("the other side does not know the secret")
                return
            sock, self._sock = self._sock, None
            self._loop.unwatch(sock.fileno())
            self._done(sock)

    def _fail(self, reason: str) -> None:
        self.cancel()
        self._failed(f"no data connection: {reason}")
