"""How a link is opened: the handshake, from either side.

Both sides prove over all that was said that they know the secret, tell where they run, and agree on
how data moves. Through sockets of our own the dialer makes a second connection and shows the ticket
that it was given for it.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
from abc import abstractmethod
from typing import Final, Protocol

from pd_transfer.dial import Attaching, Dialing, proof
from pd_transfer.errors import (
    nixlBackendError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from pd_transfer.handshake import Transport, nonce
from pd_transfer.link import Endpoint, Link
from pd_transfer.loop import Timer
from pd_transfer.messages import (
    VERSION,
    Attach,
    Challenge,
    Hello,
    Identity,
    Message,
    ProtocolError,
    Ready,
    Refused,
    Sealed,
    refusal,
    refusal_code,
)
from pd_transfer.metadata import Metadata
from pd_transfer.tcp_wire import TcpWire

logger: Final = logging.getLogger("pd_transfer")

_HANDSHAKE_SECONDS: Final = 10.0
_TICKET: Final = 32


class _OpeningLink(Link):
    _peer_role: bytes

    def _opened(self, message: Message) -> Message:
        if not isinstance(message, Sealed):
            raise ProtocolError("expected a sealed message")
        try:
            return self._transcript.open(self._peer_role, message)
        except nixlNotAllowedError as error:
            self._unproven(error)
            raise ProtocolError(str(error)) from error

    def _unproven(self, error: Exception) -> None:
        """The peer does not know the secret."""

    def _introduced(self, message: Message) -> Identity:
        """The peer, which has proved itself, tells where it runs."""
        identity = self._opened(message)
        if not isinstance(identity, Identity):
            raise ProtocolError("expected an identity")
        self.connection.trust()
        self._watch_process(identity)
        return identity


class DialingLink(_OpeningLink):
    _peer_role = b"acceptor"

    def __init__(
        self, owner: Endpoint, secret: bytes, peer: Metadata, address: tuple[str, int]
    ) -> None:
        super().__init__(owner, secret)
        self.peer, self.generation = peer.name, peer.generation
        self._address = address
        self._dialing: Dialing | Attaching | None = None
        self._timer: Timer | None = None

    def dial(self, timeout: float) -> None:
        if self.closed:
            return
        self._timer = self.owner.loop.later(timeout, lambda: self._disconnected("no answer"))
        self._dialing = Dialing(self.owner.loop, self._address, self._dialed, self._disconnected)
        self._dialing.start()

    def _dialed(self, sock: socket.socket) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.attach(sock)
        self._transcript.add(
            self.connection.send(
                Hello(
                    VERSION,
                    self.owner.state.name,
                    self.owner.state.generation,
                    self.generation,
                    nonce(),
                )
            )
        )
        self._expecting = self._challenge

    def _received(self, message: Message, body: bytes) -> None:
        if isinstance(message, Refused) and not self.proven:
            error = refusal(message.code, f"{self.peer!r} refused: {message.text}")
            self.owner.lost(self, error)
        else:
            super()._received(message, body)

    # From here on there is no deadline: the peer may be stopped or busy for long.

    def _challenge(self, message: Message, body: bytes) -> None:
        if not isinstance(message, Challenge) or message.version != VERSION:
            raise ProtocolError("expected a challenge")
        self._transcript.add(body)
        identity = self.owner.probe.identity(self.owner.transport, self.owner.fabric)
        self.connection.send(self._transcript.seal(b"dialer", identity))
        self._expecting = self._identity

    def _identity(self, message: Message, body: bytes) -> None:
        identity = self._introduced(message)
        transport = self._best_transport(identity)
        ready = Ready(transport, self._open_data(transport, identity))
        self.connection.send(self._transcript.seal(b"dialer", ready))
        self._expecting = self._ready_to_connect

    def _ready_to_connect(self, message: Message, body: bytes) -> None:
        ready = self._opened(message)
        if not isinstance(ready, Ready) or ready.transport != self._transport:
            raise ProtocolError("expected readiness")
        if isinstance(self._wire, TcpWire):
            # Nothing more is said on the control connection until the other one stands.
            self._expecting = self._unexpected
            self._dialing = Attaching(
                self.owner.loop,
                self._address,
                self._secret,
                ready.address,
                self._attached,
                self._disconnected,
            )
            return
        try:
            self._connect_data(ready.address, self._transport)
        except nixlBackendError as error:
            self.owner.lost(self, error)
            return
        self._begin()

    def _attached(self, sock: socket.socket) -> None:
        assert isinstance(self._wire, TcpWire)
        self._wire.attach(sock)
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Both sides are ready."""

    def _disconnected(self, reason: str) -> None:
        self.owner.lost(self, nixlRemoteDisconnectError(f"{self.peer!r}: {reason}"))

    def _end_all(self, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._dialing is not None:
            self._dialing.cancel()


class Acceptor(Endpoint, Protocol):
    def ticketed(self, ticket: bytes) -> AcceptingLink | None:
        """The link that waits for a data connection with this ticket."""


class AcceptingLink(_OpeningLink):
    owner: Acceptor
    _peer_role = b"dialer"

    def __init__(self, owner: Acceptor, secret: bytes, sock: socket.socket) -> None:
        super().__init__(owner, secret)
        # What a data connection shows to be joined to this link; empty where none is to come.
        self.ticket = b""
        self._best = Transport.TCP
        self._identified: Identity | None = None
        self._expecting = self._hello
        self._timer = owner.loop.later(
            _HANDSHAKE_SECONDS, lambda: self._disconnected("handshake took too long")
        )
        self.attach(sock)

    def _disconnected(self, reason: str) -> None:
        if not self.open:
            logger.info("a connection to agent %r ended: %s", self.owner.state.name, reason)
        self.owner.lost(self, nixlRemoteDisconnectError(f"{self.peer!r}: {reason}"))

    def _hello(self, message: Message, body: bytes) -> None:
        if isinstance(message, Attach):
            self._give_away(message)
            return
        if not isinstance(message, Hello) or not message.name or len(message.generation) != 16:
            raise ProtocolError("the first message is not a greeting")
        if message.version != VERSION:
            self._refuse(nixlBackendError(f"protocol {message.version}, here {VERSION}"))
        elif message.wanted_generation != self.owner.state.generation:
            self._refuse(nixlNotFoundError(f"{self.owner.state.name!r} has been restarted since"))
        else:
            self.peer, self.generation = message.name, message.generation
            self._transcript.add(body)
            self._transcript.add(self.connection.send(Challenge(VERSION, nonce())))
            self._expecting = self._identity

    def _give_away(self, message: Attach) -> None:
        """This is not a link but the data connection of one."""
        link = self.owner.ticketed(message.ticket)
        if link is None or not hmac.compare_digest(
            message.proof, proof(self._secret, b"dialer", message.ticket)
        ):
            raise ProtocolError("not the ticket of a data connection")
        assert isinstance(link._wire, TcpWire)
        sock = self.connection.detach()
        self.owner.forget(self)
        link.ticket = b""
        try:
            sock.send(proof(self._secret, b"acceptor", message.ticket))
        except OSError:
            pass  # reading will tell
        link._wire.attach(sock)

    def _identity(self, message: Message, body: bytes) -> None:
        identity = self._introduced(message)
        self._identified = identity
        self._best = self._best_transport(identity)
        own = self.owner.probe.identity(self._best, self.owner.fabric)
        self.connection.send(self._transcript.seal(b"acceptor", own))
        self._expecting = self._ready_to_connect

    def _ready_to_connect(self, message: Message, body: bytes) -> None:
        ready = self._opened(message)
        if not isinstance(ready, Ready):
            raise ProtocolError("expected readiness")
        try:
            transport = Transport(ready.transport)
        except ValueError as error:
            raise ProtocolError(f"transport {ready.transport}") from error
        if transport > self._best:
            raise ProtocolError("a transport that was not offered")
        assert self._identified is not None
        address = self._open_data(transport, self._identified)
        if transport == Transport.TCP:
            address = self.ticket = secrets.token_bytes(_TICKET)
        try:
            self._connect_data(ready.address, transport)
        except nixlBackendError as error:
            self._refuse(error)
            return
        self._timer.cancel()
        self.connection.send(self._transcript.seal(b"acceptor", Ready(transport, address)))
        self._ready()

    def _unproven(self, error: Exception) -> None:
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.connection.send(Refused(refusal_code(error), str(error)))
        self._disconnected(f"refused: {error}")

    def _end_all(self, error: Exception) -> None:
        self._timer.cancel()
