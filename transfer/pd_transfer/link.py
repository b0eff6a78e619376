"""What the two ends of a link have in common: a control connection, a wire, the peer's life.

A link has a direction. The dialer added the acceptor as a remote agent and issues transfers; the
acceptor serves them out of and into its registered memory. Two agents that added each other have
two links. dialed.py and accepted.py are the two ends, opening.py has how they come about.
"""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from pd_transfer.connection import Connection
from pd_transfer.cuda import device_memory
from pd_transfer.direct import Copier
from pd_transfer.handshake import Probe, Transcript, Transport, best_transport, host_id
from pd_transfer.loop import Loop
from pd_transfer.messages import Identity, Message, ProtocolError
from pd_transfer.regions import HOST, Place
from pd_transfer.runs import HOST_MEMORY, Memory
from pd_transfer.state import State
from pd_transfer.tcp_wire import TcpWire
from pd_transfer.ucx_wire import UcxWire
from pd_transfer.wire import Wire


class Endpoint(Protocol):
    """What a link needs of its backend."""

    state: State
    loop: Loop
    probe: Probe
    transport: Transport
    fabric: Transport

    def context(self, transport: Transport, devices: bool = False) -> Any:
        """
        Raises:
            nixlBackendError: UCX cannot be used.
        """

    def opened(self, link: Link) -> None: ...

    def lost(self, link: Link, error: Exception) -> None:
        """The link's peer is to be given up, with all of its links."""

    def forget(self, link: Link) -> None:
        """The link alone is to be closed, on purpose."""


class Link(ABC):
    """In the loop's thread, but for what says otherwise."""

    def __init__(self, owner: Endpoint, secret: bytes) -> None:
        self.owner = owner
        self.peer = ""
        self.generation = b""
        self.closed = False
        self.open = False
        # Has been open. Unlike `open` it stays true while the link is being closed.
        self.proven = False
        self._secret = secret
        self._transcript = Transcript(secret)
        self._expecting: Callable[[Message, bytes], None] = self._unexpected
        self._connection: Connection | None = None
        # Data moves by one of these.
        self._wire: Wire | None = None
        self._copier: Copier | None = None
        self._transport = Transport.TCP
        # And by this where a GPU's memory is at either end: UCX alone can move that. It is opened
        # when first needed.
        self._device_wire: UcxWire | None = None
        self._pidfd = -1
        # Between the loop's thread and those that post by themselves: open, closed, leaving.
        self._lock = threading.RLock()

    @property
    def wire(self) -> Wire:
        assert self._wire is not None
        return self._wire

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def attach(self, sock: socket.socket) -> None:
        self._connection = Connection(self.owner.loop, sock, self._received, self._disconnected)

    def close(self, error: Exception) -> None:
        """Nothing of this link lands or leaves after this; what was under way ends with `error`."""
        if self.closed:
            return
        with self._lock:
            self.closed, self.open = True, False
        if self._wire is not None:
            self._wire.destroy()
        if self._copier is not None:
            self._copier.destroy()
        if self._device_wire is not None:
            self._device_wire.destroy()
        if self._pidfd >= 0:
            self.owner.loop.unwatch(self._pidfd)
            os.close(self._pidfd)
        if self._connection is not None:
            self._connection.close()
        self._end_all(error)

    @abstractmethod
    def _end_all(self, error: Exception) -> None:
        """Give back what the operations of this link hold."""

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """A message after the handshake.

        Raises:
            ProtocolError: it has no place here.
        """

    @abstractmethod
    def _disconnected(self, reason: str) -> None: ...

    def _best_transport(self, identity: Identity) -> Transport:
        best = best_transport(self.owner.transport, self.owner.fabric, identity)
        if best == Transport.CROSS_MEMORY and self._pidfd < 0 and identity.pid != os.getpid():
            return Transport.SHARED_MEMORY  # nothing would tell another process of its number
        return best

    def _open_data(self, transport: Transport, identity: Identity) -> bytes:
        """Prepare to move data. Returns the address of our end of it, where it has one."""
        self._transport = transport
        if transport == Transport.CROSS_MEMORY:
            self._copier = Copier(self.owner.loop, identity.pid, self._pidfd, self._disconnected)
            return b""
        if transport == Transport.TCP:
            self._wire = TcpWire(self.owner.loop, self._disconnected)
            return b""
        wire = UcxWire(self.owner.loop, self.owner.context(transport), self._disconnected)
        self._wire = wire
        return wire.address

    def _connect_data(self, address: bytes, transport: Transport) -> None:
        """
        Raises:
            nixlBackendError: UCX finds no way there.
        """
        if isinstance(self._wire, UcxWire):
            self._wire.connect(address, transport)

    def _open_device_wire(self) -> UcxWire:
        """
        Raises:
            nixlBackendError: UCX cannot be used.
        """
        for region in self.owner.state.regions.snapshot():
            self._memory(region.place)  # before UCX looks at CUDA from this thread
        context = self.owner.context(self._over_ucx, devices=True)
        return UcxWire(self.owner.loop, context, self._disconnected)

    @property
    def _over_ucx(self) -> Transport:
        """What joins the two hosts by UCX."""
        beside = self._transport >= Transport.SHARED_MEMORY
        return Transport.SHARED_MEMORY if beside else Transport.NETWORK

    def _memory(self, place: Place) -> Memory:
        """For UCX to work on in the loop's thread, the only one to call this.

        Raises:
            nixlBackendError: the GPU cannot be used.
        """
        if place is HOST:
            return HOST_MEMORY
        memory = device_memory(place.device)
        memory.use()
        return memory

    def _watch_process(self, identity: Identity) -> None:
        """A killed process whose children hold its socket sends no end of file; this tells."""
        if identity.host != host_id() or identity.pid == os.getpid():
            return
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except OSError:
            return  # gone already, which the connection will tell, or not supported here
        self.owner.loop.watch(self._pidfd, lambda: self._disconnected("process ended"))

    def _ready(self) -> None:
        self.open = self.proven = True
        self._expecting = self._serve
        self.owner.opened(self)

    def _serve(self, message: Message, body: bytes) -> None:
        self._handle(message)

    def _unexpected(self, message: Message, body: bytes) -> None:
        raise ProtocolError(f"unexpected {type(message).__name__}")

    def _received(self, message: Message, body: bytes) -> None:
        self._expecting(message, body)
