"""The bulk data of one peer through UCX: a worker of its own, and queues of sends and receives.

Every message of a plan has a tag made of its transfer's id and its place in the plan. Both queues
are served strictly in order, which is the order of the announcements on the control connection on
either side: so the oldest unfinished message always has room, and no two transfers can wait for
each other.

A worker for each peer, because UCX cannot take back what has matched. Once `destroy` has returned
the worker is never progressed again, and UCX is told to use no scheme in which a sender writes
into the receiver's memory: then nothing from that peer can land.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from pd_transfer.errors import nixlBackendError
from pd_transfer.handshake import Transport
from pd_transfer.loop import Loop
from pd_transfer.runs import COPIED, HOST_MEMORY, OWN_MESSAGE, direct
from pd_transfer.wire import INDEX_BITS, Receiving, Sending, Wire

logger: Final = logging.getLogger("pd_transfer")

_WINDOW: Final = 8
_ROUNDS: Final = 64

_SHARED: Final = "posix,sysv,self"


def open_context(transport: Transport, settings: Mapping[str, str], devices: bool = False) -> Any:
    """A UCX context for all peers reached by one transport; `settings` take precedence.

    On one host UCX is kept to shared memory, so it opens no sockets there; with `devices` it may
    use what it has for CUDA, too.

    Raises:
        nixlBackendError: UCX cannot be used like that.
    """
    chosen = {"RNDV_SCHEME": "get_zcopy"}
    if devices:
        chosen["CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    if transport == Transport.SHARED_MEMORY:
        chosen["TLS"] = _SHARED + ",cuda" * devices
    features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
    try:
        return libucxx.UCXContext({**chosen, **settings}, feature_flags=features)
    except libucxx.UCXError as error:
        raise nixlBackendError(f"UCX: {error}") from error


def sees_devices(context: Any) -> bool:
    """Whether UCX tells a GPU's memory from the host's. It takes it for the host's else, and dies.

    Its transports for CUDA are a library that is loaded only where CUDA's driver and NVML are.
    """
    return "cuda_copy/" in context.info


class _Sent(NamedTuple):
    request: Any
    job: Sending
    data: Any  # kept alive until UCX is done with it


class _Expected(NamedTuple):
    request: Any
    job: Receiving
    place: int
    staging: Any


class UcxWire(Wire):
    """`broken` is called, once, if UCX reports an error."""

    packing = COPIED

    def __init__(self, loop: Loop, context: Any, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._broken = broken
        self._worker: Any = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._fd: int = self._worker.epoll_file_descriptor
        self._to_send: deque[Sending] = deque()
        self._to_receive: deque[Receiving] = deque()
        self._sent: list[_Sent] = []
        self._expected: list[_Expected] = []
        loop.watch(self._fd, self._wake)
        # A worker tells of nothing before it has been armed once.
        self._wake()

    @property
    def connected(self) -> bool:
        return self._endpoint is not None

    @property
    def address(self) -> bytes:
        return bytes(memoryview(self._worker.address))

    def connect(self, address: bytes, transport: Transport) -> None:
        """
        Raises:
            nixlBackendError: no transport reaches that address.
        """
        # With error handling UCX would give up shared memory, and CUDA between processes; a dead
        # neighbour is noticed by its control connection and its pidfd instead.
        try:
            self._endpoint = self._worker.create_endpoint_from_worker_address(
                libucxx.UCXAddress.create_from_buffer(bytearray(address)),
                transport == Transport.NETWORK,
            )
        except libucxx.UCXError as error:
            raise nixlBackendError(f"no transport: {error}") from error
        self._wake()

    def send(self, job: Sending) -> None:
        self._to_send.append(job)
        self._wake()

    def receive(self, job: Receiving) -> None:
        self._to_receive.append(job)
        self._wake()

    def stop_sending(self, job: Sending) -> None:
        if not job.finished:
            job.stopped = True
            self._to_send.remove(job)
            self._wake()
            if job.idle:
                job.on_idle()

    def stop_receiving(self, job: Receiving, limit: int) -> None:
        ended = job.done
        if ended:
            return
        job.limit = limit
        job.discard = True
        # No message will ever match these, so UCX can take them back: letting go of a request
        # cancels it.
        kept = [item for item in self._expected if item.job is not job or item.place < limit]
        job.in_flight -= len(self._expected) - len(kept)
        self._expected = kept
        if job.finished and job in self._to_receive:
            self._to_receive.remove(job)
        self._wake()
        if job.done:
            job.on_done()

    def progress(self) -> bool:
        if self._worker is None:
            return True
        try:
            for _ in range(_ROUNDS):
                moved = bool(self._worker.progress_once())
                moved |= self._reap_sent() | self._reap_expected()
                moved |= self._fill_sends() | self._fill_receives()
                if not moved and self._worker.arm():
                    return True
        except libucxx.UCXError as error:
            self._broken(f"UCX: {error}")
            return True
        except nixlBackendError as error:
            self._broken(str(error))
            return True
        return False

    def destroy(self) -> None:
        if self._worker is None:
            return
        self._loop.idle(self)
        self._loop.unwatch(self._fd)
        self._settle()
        self._sent.clear()
        self._expected.clear()
        self._to_send.clear()
        self._to_receive.clear()
        # If a rendezvous is pending, UCX's objects keep each other alive: inert, a small leak.
        self._endpoint = None
        self._worker = None

    def _settle(self) -> None:
        """A GPU copies by itself: UCX may have begun copies that nobody would hear the end of."""
        for memory in {item.job.memory for item in self._expected}:
            try:
                memory.settle()
            except nixlBackendError as error:  # a broken GPU writes nothing either
                logger.warning("waiting for a GPU's copies: %s", error)

    def _wake(self) -> None:
        self._loop.busy(self)

    def _reap_sent(self) -> bool:
        finished = [item for item in self._sent if item.request.completed]
        if not finished:
            return False
        done = {id(item) for item in finished}
        self._sent = [item for item in self._sent if id(item) not in done]
        for item in finished:
            item.request.check_error()
            item.job.in_flight -= 1
            if item.job.idle:
                item.job.on_idle()
        return True

    def _reap_expected(self) -> bool:
        finished = [item for item in self._expected if item.request.completed]
        if not finished:
            return False
        done = {id(item) for item in finished}
        self._expected = [item for item in self._expected if id(item) not in done]
        for request, job, place, staging in finished:
            request.check_error()
            if staging is not None and not job.discard:
                message = job.plan[place]
                pieces = slice(message.first, message.last)
                job.memory.scatter(staging, job.addresses[pieces], job.lengths[pieces])
            job.in_flight -= 1
            if job.done:
                job.on_done()
        return True

    def _fill_sends(self) -> bool:
        moved = False
        while self._endpoint is not None and self._to_send and len(self._sent) < _WINDOW:
            moved = True
            job = self._to_send[0]
            if job.next < len(job.plan):
                self._send_next(job)
            if job.finished:
                self._to_send.popleft()
                if job.idle:  # nothing to send at all
                    job.on_idle()
        return moved

    def _send_next(self, job: Sending) -> None:
        message = job.plan[job.next]
        whole = direct(job.addresses, job.lengths, message)
        if whole is None:
            pieces = slice(message.first, message.last)
            data = job.memory.gather(job.addresses[pieces], job.lengths[pieces])
        else:
            data = job.memory.view(*whole)
        request = self._endpoint.tag_send(Array(data), _tag(job.id, job.next))
        self._sent.append(_Sent(request, job, data))
        job.next += 1
        job.in_flight += 1

    def _fill_receives(self) -> bool:
        moved = False
        while self._to_receive and len(self._expected) < _WINDOW:
            job = self._to_receive[0]
            if job.limit is None:
                # Refused, and how much of it is on its way is still to be told. What was
                # announced later was also sent later.
                break
            moved = True
            if job.next < job.limit:
                self._receive_next(job)
            if job.finished:
                self._to_receive.popleft()
                if job.done:  # nothing to receive at all
                    job.on_done()
        return moved

    def _receive_next(self, job: Receiving) -> None:
        staging: Any = None
        if job.discard:
            data = staging = HOST_MEMORY.staging(OWN_MESSAGE)
        else:
            message = job.plan[job.next]
            whole = direct(job.addresses, job.lengths, message)
            if whole is None:
                data = staging = job.memory.staging(message.nbytes)
            else:
                data = job.memory.view(*whole)
        request = self._worker.tag_recv(Array(data), _tag(job.id, job.next))
        self._expected.append(_Expected(request, job, job.next, staging))
        job.next += 1
        job.in_flight += 1


def _tag(id: int, index: int) -> Any:
    return libucxx.UCXXTag((id << INDEX_BITS | index) & (2**64 - 1))
