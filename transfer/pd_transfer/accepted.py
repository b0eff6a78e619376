"""The acceptor's end of a link: it lets a peer write to and read from registered memory."""

from __future__ import annotations

import hmac
import logging
import socket
from dataclasses import dataclass
from typing import Final

from pd_transfer.dial import proof
from pd_transfer.direct import Copy
from pd_transfer.enums import nixl_xfer_op_t
from pd_transfer.errors import nixlBackendError, nixlNotFoundError
from pd_transfer.messages import (
    Bye,
    Done,
    Drained,
    Failed,
    Granted,
    Message,
    Notify,
    Open,
    Opened,
    Post,
    ProtocolError,
    ReadEnded,
    Refused,
    Stop,
    Stopped,
    refusal_code,
    unpack_runs,
    unpack_sources,
)
from pd_transfer.opening import AcceptingLink, Acceptor
from pd_transfer.regions import HOST, Vector
from pd_transfer.runs import HOST_MEMORY, Memory, Runs
from pd_transfer.wire import Receiving, Sending, Wire

logger: Final = logging.getLogger("pd_transfer")

_HANDSHAKE_SECONDS: Final = 10.0
_TICKET: Final = 32


@dataclass(eq=False)
class _Service:
    """A transfer of the peer's. `admitted`: its regions are held. `wire` is None where one side
    copies out of the other."""

    post: Post
    runs: Runs
    wire: Wire | None
    admitted: bool
    job: Sending | Receiving | Copy | None = None


class AcceptedLink(AcceptingLink):
    def __init__(self, owner: Acceptor, secret: bytes, sock: socket.socket) -> None:
        self._services: dict[int, _Service] = {}
        super().__init__(owner, secret, sock)

    def _handle(self, message: Message) -> None:
        match message:
            case Post():
                self._begin(message)
            case Notify():
                self.owner.state.notified(self.peer, message.message)
            case Stopped():
                service = self._services.get(message.id)
                # None where its end crossed with the abort.
                if service is None:
                    return
                if isinstance(service.job, Receiving):
                    assert service.wire is not None
                    service.wire.stop_receiving(service.job, message.sent)
                elif isinstance(service.job, Copy):
                    self._stop_copying(service, service.job)
            case Stop():
                service = self._services.get(message.id)
                if service is not None and isinstance(service.job, Sending):
                    assert service.wire is not None
                    service.wire.stop_sending(service.job)
                    self.connection.send(Stopped(message.id, service.job.next))
            case ReadEnded():
                self._read_ended(message)
            case Open():
                self._open_devices(message)
            case Bye():
                self.owner.forget(self)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _begin(self, post: Post) -> None:
        addresses, lengths = unpack_runs(post)
        if post.id in self._services or post.operation not in (0, 1):
            raise ProtocolError("a transfer that cannot be")
        wire = self._device_wire if post.on_device else self._wire
        if post.on_device and wire is None:
            raise ProtocolError("a way for a GPU's memory that was not opened")
        service = _Service(post, Runs(addresses, addresses, lengths), wire, admitted=True)
        memory = HOST_MEMORY
        try:
            memory = self._admit(post, addresses, lengths)
        except (nixlNotFoundError, nixlBackendError) as error:
            service.admitted = False
            self.connection.send(Failed(post.id, refusal_code(error), str(error)))
        if wire is None:
            if service.admitted:
                self._begin_direct(service, addresses, lengths)
        elif post.operation == nixl_xfer_op_t.NIXL_READ:
            if service.admitted:
                service.job = Sending(
                    post.id, addresses, lengths, wire.packing, lambda: None, memory
                )
                self._services[post.id] = service
                wire.send(service.job)
        else:
            service.job = Receiving(
                post.id,
                addresses,
                lengths,
                wire.packing,
                lambda: self._write_ended(service),
                memory,
                discard=not service.admitted,
            )
            self._services[post.id] = service
            wire.receive(service.job)

    def _admit(self, post: Post, addresses: Vector, lengths: Vector) -> Memory:
        """Holds the post's regions; the memory that they are of.

        Raises:
            nixlNotFoundError: not its memory, or a GPU's, which only UCX can reach.
            nixlBackendError: the GPU cannot be used.
        """
        regions = self.owner.state.regions
        place = regions.admit(post.regions, addresses, lengths)
        try:
            if not post.on_device:
                if place is not HOST:
                    raise nixlNotFoundError("a GPU's memory cannot be reached like this")
                return HOST_MEMORY
            return self._memory(place)
        except (nixlNotFoundError, nixlBackendError):
            regions.release(post.regions)
            raise

    def _open_devices(self, message: Open) -> None:
        """The way for transfers with a GPU's memory at either end."""
        expected = proof(self._secret, b"dialer's device", message.address)
        if self._device_wire is not None or not hmac.compare_digest(message.proof, expected):
            raise ProtocolError("not an address for a GPU's memory")
        try:
            wire = self._open_device_wire()
        except nixlBackendError as error:
            self.connection.send(Refused(refusal_code(error), str(error)))
            return
        try:
            wire.connect(message.address, self._over_ucx)
        except nixlBackendError as error:
            wire.destroy()
            self.connection.send(Refused(refusal_code(error), str(error)))
            return
        self._device_wire = wire
        sealed = proof(self._secret, b"acceptor's device", wire.address)
        self.connection.send(Opened(wire.address, sealed))

    def _begin_direct(self, service: _Service, addresses: Vector, lengths: Vector) -> None:
        assert self._copier is not None
        post = service.post
        self._services[post.id] = service
        if post.operation == nixl_xfer_op_t.NIXL_READ:
            self.connection.send(Granted(post.id))
            return
        service.job = Copy(
            addresses,
            unpack_sources(post),
            lengths,
            lambda error: self._write_ended(service, error),
        )
        self._copier.add(service.job)

    def _stop_copying(self, service: _Service, job: Copy) -> None:
        assert self._copier is not None
        if self._copier.cancel(job):
            del self._services[service.post.id]
            self.owner.state.regions.release(service.post.regions)
            self.connection.send(Drained(service.post.id))

    def _write_ended(self, service: _Service, error: Exception | None = None) -> None:
        post, job = service.post, service.job
        del self._services[post.id]
        service.job = None  # which holds the service: a cycle would wait for the collector
        if service.admitted:
            self.owner.state.regions.release(post.regions)
        if isinstance(job, Receiving) and job.discard:
            self.connection.send(Drained(post.id))
            return
        if error is not None:
            self.connection.send(Failed(post.id, refusal_code(error), str(error)))
            return
        self.owner.state.served(nixl_xfer_op_t.NIXL_WRITE, service.runs, post.descriptors)
        if post.notification is not None:
            self.owner.state.notified(self.peer, post.notification)
        self.connection.send(Done(post.id))

    def _read_ended(self, message: ReadEnded) -> None:
        service = self._services.get(message.id)
        # A write's memory is given back only once nothing of it can land any more.
        if service is None or service.post.operation != nixl_xfer_op_t.NIXL_READ:
            raise ProtocolError("the end of a read that is not there")
        # Handed over whole; that the last of it has left is told here later than it arrives there.
        if isinstance(service.job, Sending) and not service.job.finished:
            raise ProtocolError("the end of a read that is still being sent")
        del self._services[message.id]
        self.owner.state.regions.release(service.post.regions)
        if message.completed:
            self.owner.state.served(
                nixl_xfer_op_t.NIXL_READ, service.runs, service.post.descriptors
            )
            if message.notification is not None:
                self.owner.state.notified(self.peer, message.notification)

    def _end_all(self, error: Exception) -> None:
        super()._end_all(error)
        for service in self._services.values():
            if service.admitted:
                self.owner.state.regions.release(service.post.regions)
        self._services.clear()
