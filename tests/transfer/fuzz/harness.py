"""One input of the fuzzer played against one end of a link.

An input is a byte that chooses the scene, then steps: what to do (a byte), how long its payload is
(two, little-endian), the payload. Most steps are a frame from the peer; the others are what the
application does meanwhile, and data on the data connection.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import pd_transfer.link
from pd_transfer import metadata
from pd_transfer.accepted import AcceptedLink
from pd_transfer.dialed import DialedLink
from pd_transfer.direct import Copier
from pd_transfer.enums import nixl_mem_t, nixl_xfer_op_t
from pd_transfer.errors import nixlMismatchError, nixlNotAllowedError, nixlNotFoundError
from pd_transfer.handshake import Transcript, Transport
from pd_transfer.link import Link
from pd_transfer.listener import _requests
from pd_transfer.messages import HEADER, Identity, ProtocolError, Sealed, decode, encode
from pd_transfer.regions import locate
from pd_transfer.runs import Runs
from pd_transfer.state import Transfer
from pd_transfer.tcp_wire import TcpWire
from tests.transfer.fuzz.world import Memory, NoUcx, Owner, StillLoop, Wormhole

SECRET: Final = b"known to the peer"
_STEP: Final = struct.Struct("<BH")
_drain: Final = bytearray(1 << 20)
_VICTIM: Final = 0x5F00_0000_0000
_PEER: Final = 0x5F10_0000_0000


class Scene(enum.IntEnum):
    ACCEPTING = 0
    """From the first byte on; sealed frames get a right seal."""
    SERVING = 1
    """The acceptor of an open link, on one host."""
    SERVING_TCP = 2
    ISSUING = 3
    """The dialer of an open link, on one host, with transfers under way."""
    ISSUING_TCP = 4
    METADATA = 5


class Do(enum.IntEnum):
    FRAME = 0
    TURN = 1
    """The loop goes round once."""
    DATA = 2
    POST = 3
    ABORT = 4
    LEAVE = 5
    DEREGISTER = 6
    RAW = 7
    """Bytes that need not be a frame."""


def step(do: Do, payload: bytes = b"") -> bytes:
    return _STEP.pack(do, len(payload)) + payload


def steps(data: bytes) -> list[tuple[Do, bytes]]:
    """What follows the scene; a torn end is left out."""
    found = []
    place = 1
    while place + _STEP.size <= len(data):
        do, length = _STEP.unpack_from(data, place)
        place += _STEP.size
        found.append((Do(do % len(Do)), data[place : place + length]))
        place += length
    return found


victim: Final = Memory(_VICTIM)
peer: Final = Memory(_PEER)


def play(data: bytes) -> None:
    """
    Raises:
        Exception: a defect.
    """
    if not data:
        return
    scene = Scene(data[0] % len(Scene))
    if scene == Scene.METADATA:
        _metadata(data[1:])
        return
    with patch.object(pd_transfer.link, "UcxWire", NoUcx):
        stage = Stage(scene)
        try:
            for do, payload in steps(data):
                if not stage.link.closed:
                    stage.do(do, payload)
        finally:
            stage.close()
    stage.check()


def _metadata(data: bytes) -> None:
    try:
        loaded = metadata.decode(data)
        locate(loaded.regions, nixl_mem_t.DRAM_SEG, victim.rows)
    except (nixlMismatchError, nixlNotFoundError):
        pass
    try:
        _requests.decode(data)
    except ValueError:  # msgspec's errors
        pass


class Stage:
    """One link and what belongs to it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.loop = StillLoop()
        self.owner = Owner(victim, self.loop)
        self.sock = Wormhole()
        self.posted: list[Transfer] = []
        self._seal = Transcript(SECRET)
        self._said = 0
        self._far: socket.socket | None = None
        owner: Any = self.owner
        sock: Any = self.sock
        self.link: Link
        if scene in (Scene.ISSUING, Scene.ISSUING_TCP):
            known = metadata.Metadata(metadata.VERSION, "peer", bytes(16), "UCX", b"", [])
            self.link = DialedLink(owner, SECRET, known, ("127.0.0.1", 1))
            self.link.attach(sock)
        else:
            self.link = AcceptedLink(owner, SECRET, sock)
        if scene != Scene.ACCEPTING:
            self._open()

    def _open(self) -> None:
        link = self.link
        link.peer, link.generation = "peer", bytes(16)
        link.connection.trust()
        if self.scene in (Scene.SERVING, Scene.ISSUING):
            link._copier = Copier(self.loop, os.getpid(), -1, link._disconnected)
        else:
            near, self._far = socket.socketpair()
            self._far.setblocking(False)
            link._wire = TcpWire(self.loop, link._disconnected)
            link._wire.attach(_Unix(fileno=near.detach()))
        link._ready()
        if isinstance(link, DialedLink):
            for kind in (0, 1, 2, 3):
                self._post(kind)

    def do(self, do: Do, payload: bytes) -> None:
        match do:
            case Do.FRAME:
                self._frame(payload)
            case Do.RAW:
                self._arrive(payload)
            case Do.TURN:
                self.loop.turn_once()
            case Do.DATA:
                self._data(payload)
            case Do.POST:
                self._post(payload[0] if payload else 0)
            case Do.ABORT:
                if isinstance(self.link, DialedLink) and self.posted:
                    self.link.abort(self.posted[(payload or b"\0")[0] % len(self.posted)])
            case Do.LEAVE:
                if isinstance(self.link, DialedLink):
                    self.link.leave()
            case Do.DEREGISTER:
                try:
                    self.owner.state.regions.remove(nixl_mem_t.DRAM_SEG, victim.rows)
                except nixlNotAllowedError:
                    pass  # in use
                except nixlNotFoundError:
                    self.owner.state.regions.add(nixl_mem_t.DRAM_SEG, victim.rows)

    def _frame(self, body: bytes) -> None:
        if self.scene == Scene.ACCEPTING:
            body = self._sealed(body)
        self._arrive(HEADER.pack(len(body)) + body)

    def _sealed(self, body: bytes) -> bytes:
        """As the peer would, who knows the secret and has heard what was said."""
        heard = bytes(self.sock.sent[self._said :])
        self._said += len(heard)
        while heard:
            (length,) = HEADER.unpack_from(heard)
            said, heard = heard[HEADER.size : HEADER.size + length], heard[HEADER.size + length :]
            message = decode(said)
            self._seal.add(message.body if isinstance(message, Sealed) else said)
        try:
            inner = decode(body)
        except ProtocolError:
            return body
        if not isinstance(inner, Sealed):
            self._seal.add(body)
            return body
        said_by_peer = inner.body
        try:
            identity = decode(said_by_peer)
            if isinstance(identity, Identity) and not identity.pid:
                # Of the corpus: a process that is there, and may be read.
                said_by_peer = encode(
                    self.owner.probe.identity(
                        Transport(identity.transport % 4), Transport(identity.fabric % 2)
                    )
                )
        except ProtocolError:
            pass
        sealed = Sealed(self._seal._mac(b"dialer", said_by_peer), said_by_peer)
        self._seal.add(said_by_peer)
        return encode(sealed)

    def _arrive(self, data: bytes) -> None:
        if data:
            self.sock.coming.append(data)
            self.link.connection._ready()

    def _data(self, payload: bytes) -> None:
        if self._far is None or self.link._wire is None:
            return
        try:
            self._far.send(payload)
            while self._far.recv_into(_drain):
                pass
        except OSError:
            pass
        for handler in list(self.loop.watched.values()):
            if not self.link.closed:
                handler()

    def _post(self, kind: int) -> None:
        if not isinstance(self.link, DialedLink) or len(self.posted) > 16:
            return
        count = 1 + (kind >> 2) % 8
        place = np.arange(count, dtype=np.uint64) * 3000
        lengths = np.full(count, 100 * (1 + (kind >> 5)), np.uint64)
        runs = Runs(victim.regions[0] + place, peer.regions[1] + place * 2, lengths)
        post = Transfer(
            operation=nixl_xfer_op_t.NIXL_READ if kind & 1 else nixl_xfer_op_t.NIXL_WRITE,
            peer="peer",
            generation=bytes(16),
            runs=runs,
            descriptors=count,
            local_regions=[1],
            remote_regions=[1],
            notification=b"n" if kind & 2 else None,
            handle=1,
        )
        try:
            self.owner.state.regions.hold([1])
        except nixlNotFoundError:
            return  # deregistered meanwhile
        self.owner.state.count(transfers_active=1)
        self.posted.append(post)
        self.link.submit(post)

    def close(self) -> None:
        if not self.link.closed:
            self.link.close(RuntimeError("the play is over"))
        self.loop.turn_once()
        if self._far is not None:
            self._far.close()

    def check(self) -> None:
        victim.check()
        assert not self.loop.watched, "a descriptor is still watched"
        assert not self.owner.state.regions.busy(), "memory is still held"
        assert all(transfer.ended for transfer in self.posted), "a transfer has not ended"
        assert self.owner.state.statistics().transfers_active == 0


class _Unix(socket.socket):
    def setsockopt(self, *option: Any) -> None:
        """Has no delay to be taken away."""
