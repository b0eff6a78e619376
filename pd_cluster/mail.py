"""Messages between actors on the path of tokens, each pair's in order over a TCP connection.

Ray's calls carry them too, at some milliseconds and a multiple of the processor time each. They
remain the way to introduce two actors, and what a connection that breaks falls back to: what was
sent and not acknowledged is handed back to its sender. So nothing is lost, but a message may come
twice, which every receiver must allow.

Both ends prove that they know the cluster's secret before anything else is read
(`multiprocessing.connection`, of which only the byte frames are used: nothing is unpickled).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from pd_cluster.startup import go_ahead

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 20
# A peer that takes or sends nothing for so long in the middle of a message is given up (seconds).
STALLED_S = 5.0
# Between two tries to reach somebody (seconds).
AGAIN_S = 60.0
# An acknowledgement wakes the sender for nothing, as a rule. So it waits until it speaks for so
# many messages, or bytes, or for so long (seconds): a line's end hands back that much at most.
ACKNOWLEDGE_MESSAGES = 64
ACKNOWLEDGE_BYTES = 1 << 20
ACKNOWLEDGE_S = 1.0
# Strangers that may be proving themselves at the same time.
MAX_STRANGERS = 64

_ACK = struct.Struct("<Q")


class _Line:
    """One open connection to a recipient. `unsure` holds what it has not acknowledged yet."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unsure: deque[Callable[[], None]] = deque()
        self.acknowledged = 0
        self.open = True
        # Two: acknowledgements must be taken while a long message is being sent.
        self._sending, self._state = threading.Lock(), threading.Lock()

    def send(self, data: bytes, otherwise: Callable[[], None]) -> bool:
        with self._sending:
            with self._state:
                if not self.open:
                    return False
                self.unsure.append(otherwise)
            try:
                self.connection.send_bytes(data)
            except OSError:
                # Its end is noticed by who listens to it, and what is unsure then handed back.
                self._hang_up()
        return True

    def take_acknowledgement(self) -> None:
        """Raises EOFError, OSError or struct.error where the line is over."""
        (count,) = _ACK.unpack(self.connection.recv_bytes(_ACK.size))
        with self._state:
            while self.acknowledged < count and self.unsure:
                self.unsure.popleft()
                self.acknowledged += 1

    def close(self) -> list[Callable[[], None]]:
        self._hang_up()  # who is sending stops
        with self._sending, self._state:
            self.connection.close()
            unsure, self.unsure = list(self.unsure), deque()
        return unsure

    def _hang_up(self) -> None:
        with self._state:
            self.open = False
        with socket.socket(fileno=os.dup(self.connection.fileno())) as sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already


class _Caller:
    """What came over one connection of somebody else's, and how much of it was acknowledged."""

    def __init__(self) -> None:
        self.count = 0
        self.owed_messages = 0
        self.owed_bytes = 0
        self.owed_since = 0.0

    def took(self, nbytes: int) -> None:
        if not self.owed_messages:
            self.owed_since = time.monotonic()
        self.count += 1
        self.owed_messages += 1
        self.owed_bytes += nbytes

    @property
    def much(self) -> bool:
        return self.owed_messages >= ACKNOWLEDGE_MESSAGES or self.owed_bytes >= ACKNOWLEDGE_BYTES


class Mail:
    """An actor's post office: what it is sent, and its lines to others.

    Args:
        name: who it is; a sender that wants somebody else is turned away.
        host: the address to listen on, and that others dial.
        receive: called with each message, one at a time, from a thread of its own.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self, name: str, host: str, secret: bytes, receive: Callable[[bytes], None]
    ) -> None:
        self.name = name
        self._secret = secret
        self._receive = receive
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._lines: dict[str, _Line] = {}
        self._dialled: dict[str, float] = {}
        self._callers: dict[Connection, _Caller] = {}
        # Of them, those that wait for an acknowledgement, in the order since when.
        self._owed: dict[Connection, _Caller] = {}
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        self._closed = False
        self._selector = selectors.EpollSelector()  # it may be added to while it waits
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mail", daemon=True)
        self._thread.start()

    def send(self, recipient: str, data: bytes, otherwise: Callable[[], None]) -> bool:
        """Sends a message if there is a line to `recipient`; False, and nothing sent, if not.

        `otherwise` is called, from another thread, if it is not certain to have arrived.
        """
        line = self._lines.get(recipient)
        return line is not None and line.send(data, otherwise)

    def wanted(self, recipient: str) -> bool:
        """Whether it is time to learn a recipient's address, and to `dial` it; says so once."""
        now = time.monotonic()
        with self._lock:
            if recipient in self._lines or now < self._dialled.get(recipient, now):
                return False
            self._dialled[recipient] = now + AGAIN_S
        return True

    def dial(self, recipient: str, address: tuple[str, int]) -> None:
        """Tries to open a line, in the background."""
        threading.Thread(
            target=self._dial, args=(recipient, address), name="mail-dial", daemon=True
        ).start()

    def close(self) -> None:
        """Ends all lines. What was not acknowledged is handed back."""
        if not self._closed:
            self._closed = True
            self._wake.send(b"x")
            self._thread.join()
            self._waker.close()
            self._wake.close()

    # --- the callers' side ---

    def _dial(self, recipient: str, address: tuple[str, int]) -> None:
        try:
            connection = _connection(socket.create_connection(address, STALLED_S))
        except OSError as error:
            logger.warning("no line to %s at %s:%d: %s", recipient, *address, error)
            return
        try:
            answer_challenge(connection, self._secret)
            deliver_challenge(connection, self._secret)
            connection.send_bytes(recipient.encode())
            connection.recv_bytes(_ACK.size)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.warning("no line to %s at %s:%d: %s", recipient, *address, error or "refused")
            connection.close()
            return
        line = _Line(connection)
        with self._lock:
            if self._closed or recipient in self._lines:
                connection.close()
                return
            self._lines[recipient] = line
            self._selector.register(connection, selectors.EVENT_READ, (recipient, line))

    def _listen_to(self, recipient: str, line: _Line) -> None:
        try:
            line.take_acknowledgement()
        except (EOFError, OSError, struct.error):
            self._end(recipient, line)

    def _end(self, recipient: str, line: _Line) -> None:
        with self._lock:
            self._selector.unregister(line.connection)
            del self._lines[recipient]
            self._dialled.pop(recipient, None)
        for otherwise in line.close():
            self._guarded(otherwise)

    # --- the called side ---

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not self._strangers.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._welcome, args=(sock,), name="mail-in", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            connection = _connection(sock)
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                if connection.recv_bytes(1024) != self.name.encode():
                    raise AuthenticationError("it wants somebody else")
                connection.send_bytes(_ACK.pack(0))
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("turned a caller away: %s", error or "it hung up")
                connection.close()
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._callers[connection] = _Caller()
                self._selector.register(connection, selectors.EVENT_READ, connection)
        finally:
            self._strangers.release()

    def _take(self, connection: Connection) -> None:
        """The next message of a caller."""
        caller = self._callers[connection]
        try:
            data = connection.recv_bytes(MAX_MESSAGE)
            self._guarded(lambda: self._receive(data))
            caller.took(len(data))
            self._owed[connection] = caller
            if caller.much:
                self._acknowledge(connection)
        except (EOFError, OSError):
            # It may be only their direction that is over: what came need not come again.
            if connection in self._owed:
                with contextlib.suppress(OSError):
                    self._acknowledge(connection)
            self._forget(connection)

    def _acknowledge(self, connection: Connection) -> None:
        """
        Raises:
            OSError: the line is over.
        """
        caller = self._owed.pop(connection)
        caller.owed_messages = caller.owed_bytes = 0
        connection.send_bytes(_ACK.pack(caller.count))

    def _acknowledge_since(self, latest: float) -> None:
        """Those owed since then or longer."""
        for connection, caller in list(self._owed.items()):
            if caller.owed_since > latest:
                return
            try:
                self._acknowledge(connection)
            except OSError:
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._owed.pop(connection, None)
        with self._lock:
            self._selector.unregister(connection)
            del self._callers[connection]
        connection.close()

    # --- the thread ---

    def _run(self) -> None:
        go_ahead()
        while not self._closed:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._waker:
                    self._waker.recv(64)
                elif isinstance(key.data, tuple):
                    self._listen_to(*key.data)
                else:
                    self._take(key.data)
            if self._owed:
                self._acknowledge_since(time.monotonic() - ACKNOWLEDGE_S)
        self._acknowledge_since(math.inf)
        self._listener.close()
        for recipient, line in list(self._lines.items()):
            self._end(recipient, line)
        with self._lock:
            for connection in self._callers:
                connection.close()
        self._selector.close()

    def _patience(self) -> float | None:
        """How long nothing need be done by itself (seconds)."""
        if not self._owed:
            return None
        first = next(iter(self._owed.values())).owed_since
        return max(0.0, first + ACKNOWLEDGE_S - time.monotonic())

    def _guarded(self, action: Callable[[], None]) -> None:
        """The thread outlives what is done for others."""
        try:
            action()
        except Exception:
            logger.exception("a message could not be handled")


def _connection(sock: socket.socket) -> Connection:
    """Frames over a socket, in blocking mode with limits."""
    sock.settimeout(None)
    limit = struct.pack("@ll", int(STALLED_S), 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that loses power says nothing: its lines end when its kernel answers no more.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
    return Connection(sock.detach())
