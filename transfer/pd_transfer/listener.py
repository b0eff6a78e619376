"""Metadata by TCP: one agent sends its own to another, asks for it, or takes it back.

The listener greets with a nonce; a request proves knowledge of the agents' secret over it (of none,
where they have none). One request a connection, answered once.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
from typing import Final, Protocol

import msgspec

from pd_transfer import metadata as wire_metadata

logger: Final = logging.getLogger("pd_transfer")

_NONCE: Final = 32
_MAC: Final = 32
_HEADER: Final = struct.Struct("<I")
_FRAME: Final = 64 * 1024 * 1024
_SECONDS: Final = 10.0


class Send(msgspec.Struct, tag=1, array_like=True, frozen=True):
    metadata: bytes


class Fetch(msgspec.Struct, tag=2, array_like=True, frozen=True):
    name: str


class Invalidate(msgspec.Struct, tag=3, array_like=True, frozen=True):
    name: str
    generation: bytes


Request = Send | Fetch | Invalidate
_requests: Final = msgspec.msgpack.Decoder(Request)


class Owner(Protocol):
    name: str

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def remove_remote_agent(self, agent: str | bytes) -> None: ...

    def generation_of(self, agent: str) -> bytes | None: ...


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended early")
        data += part
    return bytes(data)


def _send(sock: socket.socket, secret: bytes, role: bytes, nonce: bytes, body: bytes) -> None:
    mac = hmac.digest(secret, role + nonce + body, "sha256")
    sock.sendall(_HEADER.pack(len(body)) + mac + body)


def _receive(sock: socket.socket, secret: bytes, role: bytes, nonce: bytes) -> bytes:
    (length,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    if length > _FRAME:
        raise ConnectionError(f"a frame of {length} bytes")
    mac, body = _exactly(sock, _MAC), _exactly(sock, length)
    if not hmac.compare_digest(mac, hmac.digest(secret, role + nonce + body, "sha256")):
        raise PermissionError("the other side does not know the secret")
    return body


def ask(address: tuple[str, int], secret: bytes, request: Request) -> bytes:
    """The answer: metadata to `Fetch`, else nothing.

    Raises:
        OSError: no connection, no answer, or not the secret.
    """
    with socket.create_connection(address, timeout=_SECONDS) as sock:
        nonce = _exactly(sock, _NONCE)
        _send(sock, secret, b"request", nonce, msgspec.msgpack.encode(request))
        return _receive(sock, secret, b"answer", nonce)


class Listener:
    """Serves requests one after the other, in a thread of its own, until closed.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, owner: Owner, host: str, port: int, secret: bytes) -> None:
        self._owner = owner
        self._secret = secret
        self._socket = socket.create_server((host, port))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._serve, name=f"pd_transfer {owner.name} metadata", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        # Closing alone would not wake the thread.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(_SECONDS)
                try:
                    self._answer(sock)
                except Exception as error:  # NIXL's errors have no common base
                    logger.warning("refused a metadata request: %s", error)

    def _answer(self, sock: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE)
        sock.sendall(nonce)
        request = _requests.decode(_receive(sock, self._secret, b"request", nonce))
        answer = b""
        match request:
            case Send():
                self._owner.add_remote_agent(request.metadata)
            case Fetch():
                if request.name == self._owner.name:
                    answer = self._owner.get_agent_metadata()
            case Invalidate():
                # Not a later agent of that name.
                if self._owner.generation_of(request.name) == request.generation:
                    self._owner.remove_remote_agent(request.name)
        _send(sock, self._secret, b"answer", nonce, answer)


def checked(data: bytes, name: str) -> bytes:
    """Metadata that was fetched, if it is of the agent that was asked for.

    Raises:
        LookupError: it is not.
    """
    if not data or wire_metadata.decode(data).name != name:
        raise LookupError(f"there is no agent {name!r} at this address")
    return data
