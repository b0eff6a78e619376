"""The dialer's end of a link: it issues transfers and learns how they end."""

from __future__ import annotations

import hmac
import itertools
import math
from dataclasses import dataclass
from typing import Final

from pd_transfer.dial import proof
from pd_transfer.direct import Copy
from pd_transfer.enums import nixl_xfer_op_t
from pd_transfer.errors import nixlBackendError, nixlCancelledError
from pd_transfer.link import Endpoint
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
    pack_addresses,
    pack_runs,
    refusal,
)
from pd_transfer.metadata import Metadata
from pd_transfer.opening import DialingLink
from pd_transfer.runs import HOST_MEMORY
from pd_transfer.state import Transfer
from pd_transfer.ucx_wire import UcxWire
from pd_transfer.wire import Receiving, Sending, Wire

_NEWS: Final = (Done, Failed, Drained, Stopped, Granted)
_OF_WRITES: Final = (Done, Drained)
_OF_READS: Final = (Stopped, Granted)


@dataclass(eq=False, slots=True)
class _Operation:
    """A posted transfer. It ends when the peer has confirmed and UCX is done with our memory.

    `job` is None while a read waits to be granted, and for a write that the peer fetches itself.
    `wire` is None where one side copies out of the other.
    """

    id: int
    transfer: Transfer
    wire: Wire | None
    job: Sending | Receiving | Copy | None = None
    stopping: bool = False
    refused: bool = False
    confirmed: bool = False
    error: Exception | None = None


class DialedLink(DialingLink):
    def __init__(
        self, owner: Endpoint, secret: bytes, peer: Metadata, address: tuple[str, int]
    ) -> None:
        super().__init__(owner, secret, peer, address)
        self._leaving = False
        self._ids = itertools.count(1)
        self._operations: dict[int, _Operation] = {}
        self._by_transfer: dict[Transfer, _Operation] = {}
        # What is asked for before the link, or its way for a GPU's memory, is open, in order.
        self._waiting: list[Transfer | Notify] = []

    def _begin(self) -> None:
        with self._lock:  # what other threads send comes after what has been waiting
            self._ready()
            waiting, self._waiting = self._waiting, []
            for item in waiting:
                if isinstance(item, Notify):
                    self.connection.send(item)
                else:
                    self._start(item)
        self._leave_if_done()

    # What the agent asks.

    def post_now(self, transfer: Transfer) -> bool:
        """From any thread: post without the loop's help. False if only `submit` can."""
        with self._lock:
            if not self.open or self._leaving or self._copier is None or transfer.on_device:
                return False
            self._start(transfer)
        return True

    def notify_now(self, message: Notify) -> bool:
        """From any thread. False if only `notify` can."""
        with self._lock:
            if self.open:
                self.connection.send(message)
            return self.open

    def take_here(self, transfer: Transfer, seconds: float) -> bool:
        """From any thread: wait for news of it and take them without the loop's help.

        False if it cannot, or if no message will tell the end: bytes that are on their way here are
        the loop's business. UCX is spoken to by one thread alone.
        """
        operation = self._by_transfer.get(transfer)
        if operation is None or isinstance(operation.job, (Receiving, Copy)):
            return False
        return (
            self.open
            and not isinstance(self._wire, UcxWire)
            and self._device_wire is None
            and self.connection.take_here(math.ceil(seconds * 1e3), lambda: transfer.ended)
        )

    def submit(self, transfer: Transfer) -> None:
        if self.open:
            self._start(transfer)
        else:
            self._waiting.append(transfer)

    def notify(self, message: Notify) -> None:
        if self.open:
            self.connection.send(message)
        else:
            self._waiting.append(message)

    def abort(self, transfer: Transfer) -> None:
        if transfer in self._waiting:
            self._waiting.remove(transfer)
            self.owner.state.finished(transfer, nixlCancelledError("aborted before it began"))
            return
        operation = self._by_transfer.get(transfer)
        if operation is None or operation.stopping:
            return  # it has ended, or is about to
        operation.stopping = True
        if isinstance(operation.job, Sending):
            self._stop_sending(operation)
        elif isinstance(operation.job, Receiving):
            self.connection.send(Stop(operation.id))
        elif transfer.operation == nixl_xfer_op_t.NIXL_WRITE:
            self.connection.send(Stopped(operation.id, 0))
        elif operation.job is not None:
            assert self._copier is not None
            self._copier.cancel(operation.job)
            self._copied(operation, nixlCancelledError("aborted"))

    def leave(self) -> None:
        """Abort everything; close once nothing of it can land any more."""
        with self._lock:
            self._leaving = True
        for item in list(self._waiting):
            if not isinstance(item, Notify):
                self.abort(item)
        for operation in list(self._operations.values()):
            self.abort(operation.transfer)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._leaving and not self._operations and not self._waiting:
            # Not now: the wire may be amid its progress.
            self.owner.loop.call(self._left)

    def _left(self) -> None:
        if not self.closed:
            if self.open:
                self.connection.send(Bye())
            self.owner.forget(self)

    # The way for transfers with a GPU's memory at either end.

    def _device_ready(self) -> bool:
        """
        Raises:
            nixlBackendError: UCX cannot be used here.
        """
        if self._device_wire is None:
            self._device_wire = self._open_device_wire()
            address = self._device_wire.address
            sealed = proof(self._secret, b"dialer's device", address)
            self.connection.send(Open(address, sealed))
        return self._device_wire.connected

    def _device_opened(self, message: Opened) -> None:
        if self.closed or self._device_wire is None or self._device_wire.connected:
            return
        expected = proof(self._secret, b"acceptor's device", message.address)
        if not hmac.compare_digest(message.proof, expected):
            self._disconnected("an address for a GPU's memory without the secret's proof")
            return
        try:
            self._device_wire.connect(message.address, self._over_ucx)
        except nixlBackendError as error:
            self._device_refused(error)
            return
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            assert isinstance(item, Transfer)
            self._start(item)

    def _device_refused(self, error: Exception) -> None:
        """There is no such way; the link lives on without."""
        if self.closed or self._device_wire is None or self._device_wire.connected:
            return
        self._device_wire.destroy()
        self._device_wire = None
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            assert isinstance(item, Transfer)
            self.owner.state.finished(item, error)
        self._leave_if_done()

    # The life of an operation.

    def _start(self, transfer: Transfer) -> None:
        memory = HOST_MEMORY
        if transfer.on_device:
            try:
                if not self._device_ready():
                    self._waiting.append(transfer)
                    return
                memory = self._memory(transfer.local_place)
            except nixlBackendError as error:
                self.owner.state.finished(transfer, error)
                return
        wire = self._device_wire if transfer.on_device else self._wire
        operation = _Operation(next(self._ids), transfer, wire)
        runs = transfer.runs
        addresses, lengths, uniform = pack_runs(runs.remote, runs.lengths)
        reading = transfer.operation == nixl_xfer_op_t.NIXL_READ
        self._operations[operation.id] = operation
        self._by_transfer[transfer] = operation
        self.connection.send(
            Post(
                operation.id,
                int(transfer.operation),
                transfer.remote_regions,
                addresses,
                lengths,
                uniform,
                transfer.descriptors,
                None if reading else transfer.notification,
                pack_addresses(runs.local) if wire is None and not reading else b"",
                transfer.on_device,
            )
        )
        if wire is None:
            return

        def ended() -> None:
            self._job_ended(operation)

        if reading:
            operation.job = Receiving(
                operation.id, runs.local, runs.lengths, wire.packing, ended, memory
            )
            wire.receive(operation.job)
        else:
            operation.job = Sending(
                operation.id, runs.local, runs.lengths, wire.packing, ended, memory
            )
            wire.send(operation.job)

    def _handle(self, message: Message) -> None:
        # The loop's own thread, the only one to speak to UCX, goes on with these.
        if isinstance(message, Opened):
            self.owner.loop.call(lambda: self._device_opened(message))
            return
        if isinstance(message, Refused):
            error = refusal(message.code, f"{self.peer!r} refused: {message.text}")
            self.owner.loop.call(lambda: self._device_refused(error))
            return
        if not isinstance(message, _NEWS):
            raise ProtocolError(f"unexpected {type(message).__name__}")
        operation = self._operations.get(message.id)
        if operation is None:
            if isinstance(message, Stopped):
                return  # a read that completed while its abort was on the way
            raise ProtocolError("news of a transfer that is not there")
        reading = operation.transfer.operation == nixl_xfer_op_t.NIXL_READ
        if isinstance(message, _OF_WRITES if reading else _OF_READS):
            raise ProtocolError("news of another kind of transfer")
        match message:
            case Granted():
                self._granted(operation)
                return
            case Done():
                operation.confirmed = True
            case Drained():
                operation.confirmed = True
                operation.error = operation.error or nixlCancelledError("aborted")
            case Failed():
                operation.error = refusal(message.code, f"{self.peer!r}: {message.text}")
                operation.refused = True
                self._failed(operation)
                return
            case Stopped():
                if not isinstance(operation.job, Receiving):
                    raise ProtocolError("a stop of what was not to be read")
                operation.error = operation.error or nixlCancelledError("aborted")
                assert operation.wire is not None
                operation.wire.stop_receiving(operation.job, message.sent)
                return
        self._end_if_done(operation)

    def _granted(self, operation: _Operation) -> None:
        if self._copier is None or operation.wire is not None or operation.job is not None:
            raise ProtocolError("granted what was not asked for")
        if operation.stopping:
            self._copied(operation, nixlCancelledError("aborted"))
            return
        runs = operation.transfer.runs
        operation.job = Copy(
            runs.local, runs.remote, runs.lengths, lambda error: self._copied(operation, error)
        )
        self._copier.add(operation.job)

    def _copied(self, operation: _Operation, error: Exception | None) -> None:
        operation.confirmed = True
        operation.error = error
        self._end_if_done(operation)

    def _failed(self, operation: _Operation) -> None:
        if operation.wire is None:
            operation.confirmed = True
            self._end_if_done(operation)
            return
        if isinstance(operation.job, Receiving):
            operation.wire.stop_receiving(operation.job, 0)
        elif not operation.stopping:
            operation.stopping = True
            self._stop_sending(operation)

    def _stop_sending(self, operation: _Operation) -> None:
        assert isinstance(operation.job, Sending)
        assert operation.wire is not None
        operation.wire.stop_sending(operation.job)
        self.connection.send(Stopped(operation.id, operation.job.next))

    def _job_ended(self, operation: _Operation) -> None:
        if isinstance(operation.job, Receiving):
            operation.confirmed = True
        self._end_if_done(operation)

    def _end_if_done(self, operation: _Operation) -> None:
        job = operation.job
        if not operation.confirmed or (isinstance(job, Sending) and not job.idle):
            return
        del self._operations[operation.id]
        del self._by_transfer[operation.transfer]
        operation.job = None  # which holds the operation: a cycle would wait for the collector
        reading = operation.transfer.operation == nixl_xfer_op_t.NIXL_READ
        if reading and not operation.refused:
            completed = operation.error is None
            notification = operation.transfer.notification if completed else None
            self.connection.send(ReadEnded(operation.id, completed, notification))
        self.owner.state.finished(operation.transfer, operation.error)
        self._leave_if_done()

    def _end_all(self, error: Exception) -> None:
        super()._end_all(error)
        ending = [item for item in self._waiting if not isinstance(item, Notify)]
        ending += [operation.transfer for operation in self._operations.values()]
        self._waiting.clear()
        self._operations.clear()
        self._by_transfer.clear()
        for transfer in ending:
            self.owner.state.finished(transfer, error)
