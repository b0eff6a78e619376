"""The upstream `nixl` wheel as a backend, so that an application can change over by one setting.

Our agent stands in front: handles, generations, held memory and events are ours, the bytes and the
notifications are moved by NIXL's own UCX. What one-sided transfers cannot give is not there: the
target neither checks nor counts what lands in it, there is no authentication, and a transfer that
has begun cannot be taken back, so an abort waits for its end. A peer's death is noticed by its
pidfd on the same host, and only by a failing transfer elsewhere.

NIXL brings a UCX of its own: never in one process with UCXX.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from pd_transfer import errors
from pd_transfer.descriptors import Rows
from pd_transfer.enums import nixl_mem_t, nixl_xfer_op_t
from pd_transfer.errors import (
    nixlBackendError,
    nixlMismatchError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from pd_transfer.handshake import allow_tracing, host_id
from pd_transfer.metadata import Metadata
from pd_transfer.state import Backend, PeerState, State, Transfer

logger: Final = logging.getLogger("pd_transfer")

# NIXL tells of nothing by itself: these are the seconds between looks, idle and with work to do.
_IDLE: Final = 0.001
_ACTIVE: Final = 0.00005
_OPERATIONS: Final = {nixl_xfer_op_t.NIXL_READ: "READ", nixl_xfer_op_t.NIXL_WRITE: "WRITE"}


class _Place(msgspec.Struct, frozen=True, array_like=True):
    host: str
    pid: int
    unique: str
    """NIXL's name for this agent: a restarted one must not have the old one's."""
    blob: bytes


@dataclass(eq=False)
class _Peer:
    place: _Place
    generation: bytes
    pidfd: int = -1


class NixlBackend(Backend):
    """
    Raises:
        ModuleNotFoundError: `nixl_cu12` is not installed (the extra `nixl`).
        RuntimeError: UCXX is loaded in this process.
    """

    kind = "UCX"
    wire_name = "nixl"

    def __init__(self, state: State) -> None:
        if "ucxx" in sys.modules:
            raise RuntimeError("nixl and ucxx bring a UCX each: use them in different processes")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        from nixl_cu12 import _bindings as bindings  # type: ignore[import-not-found, unused-ignore]
        from nixl_cu12._api import (  # type: ignore[import-not-found, unused-ignore]
            nixl_agent,
            nixl_agent_config,
        )

        allow_tracing()
        self.state = state
        self._bindings = bindings
        self._unique = f"{state.name}\n{state.generation.hex()}"
        self._agent: Any = nixl_agent(self._unique, nixl_agent_config(backends=["UCX"]))
        # NIXL's agent is not made for several threads; ours has its own beside the callers'.
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, Exception] = {}
        self._active: dict[Transfer, Any] = {}
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"pd_transfer {state.name}", daemon=True
        )
        self._thread.start()

    def memory_types(self) -> list[nixl_mem_t]:
        return [nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG]

    def register(self, kind: nixl_mem_t, rows: Rows) -> None:
        with self._lock:
            self._translate(lambda: self._agent.register_memory(self._reg(kind, rows)))

    def deregister(self, kind: nixl_mem_t, rows: Rows) -> None:
        with self._lock:
            self._agent.deregister_memory(self._reg(kind, rows))

    def connection(self) -> bytes:
        with self._lock:
            blob = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_Place(host_id(), os.getpid(), self._unique, blob))

    def same_place(self, one: bytes | None, other: bytes | None) -> bool:
        if one is None or other is None:
            return True
        return _decode(one).unique == _decode(other).unique

    def connect(self, peer: Metadata) -> None:
        assert peer.connection is not None
        place = _decode(peer.connection)
        known = _Peer(place, peer.generation)
        with self._lock:
            self._lost.pop(peer.name, None)
            if place.host == host_id() and place.pid != os.getpid():
                with contextlib.suppress(OSError):  # gone already, which a transfer will tell
                    known.pidfd = os.pidfd_open(place.pid)
            self._translate(lambda: self._agent.add_remote_agent(place.blob))
            self._peers[peer.name] = known

    def refresh(self, peer: Metadata) -> None:
        assert peer.connection is not None
        place = _decode(peer.connection)
        with self._lock:
            self._translate(lambda: self._agent.add_remote_agent(place.blob))

    def disconnect(self, peer: str) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            self._forget(peer, known, errors.nixlCancelledError(f"{peer!r} was removed"))

    def post(self, transfer: Transfer) -> None:
        with self._lock:
            known = self._peers.get(transfer.peer)
            if known is None or known.generation != transfer.generation:
                error: Exception = nixlNotFoundError(f"{transfer.peer!r} was removed")
            elif self._closing:
                error = nixlRemoteDisconnectError(f"agent {self.state.name!r} is closed")
            else:
                try:
                    self._active[transfer] = self._begin(transfer, known)
                    self._wake.set()
                    return
                except Exception as failure:  # NIXL's errors have no common base
                    error = _ours(failure)
        self.state.finished(transfer, error)

    def abort(self, transfer: Transfer) -> None:
        """Nothing: NIXL has no way to know that a stopped transfer lands no more."""

    def notify(self, peer: str, message: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                raise self._lost.get(peer) or nixlNotFoundError(f"unknown agent {peer!r}")
            self._translate(lambda: self._agent.send_notif(known.place.unique, b"n" + message))

    def peer_state(self, peer: str) -> PeerState | None:
        if peer in self._peers:
            return "alive"
        return "dead" if peer in self._lost else None

    def why_lost(self, peer: str) -> Exception | None:
        return self._lost.get(peer)

    def peer_is_quiet(self, peer: str) -> bool:
        return peer not in self._peers

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # Inside.

    def _reg(self, kind: nixl_mem_t, rows: Rows) -> Any:
        return self._bindings.nixlRegDList(self._segment(kind), rows)

    def _segment(self, kind: nixl_mem_t) -> Any:
        return getattr(self._bindings, kind.name)

    def _begin(self, transfer: Transfer, known: _Peer) -> Any:
        runs = transfer.runs
        local, remote = (
            self._bindings.nixlXferDList(
                self._segment(place.kind),
                np.ascontiguousarray(
                    np.stack([side, runs.lengths, np.full_like(side, place.device)], axis=1)
                ),
            )
            for side, place in (
                (runs.local, transfer.local_place),
                (runs.remote, transfer.remote_place),
            )
        )
        message = b"" if transfer.notification is None else b"n" + transfer.notification
        if not len(runs.lengths):  # NIXL has no empty transfer
            if message:
                self._agent.send_notif(known.place.unique, message)
            return None
        handle = self._agent.initialize_xfer(
            _OPERATIONS[transfer.operation], local, remote, known.place.unique, message
        )
        self._agent.transfer(handle)
        return handle

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_ACTIVE if self._active else _IDLE)
            self._wake.clear()
            try:
                self._look()
            except Exception:
                logger.exception("a defect in the transfer thread")
        error = nixlRemoteDisconnectError(f"agent {self.state.name!r} was closed")
        for name, known in list(self._peers.items()):
            del self._peers[name]
            self._forget(name, known, error)
        with self._lock:
            self._agent = None

    def _look(self) -> None:
        ended: list[tuple[Transfer, Exception | None]] = []
        with self._lock:
            for transfer, handle in list(self._active.items()):
                try:
                    if handle is not None and self._agent.check_xfer_state(handle) == "PROC":
                        continue
                    error = None
                except Exception as failure:
                    error = _ours(failure)
                del self._active[transfer]
                ended.append((transfer, error))
            arrived = self._agent.get_new_notifs()
        for transfer, error in ended:
            self.state.finished(transfer, error)
        for sender, messages in arrived.items():
            for message in messages:
                self.state.notified(sender.split("\n")[0], message[1:])
        for name, known in list(self._peers.items()):
            if known.pidfd >= 0 and select.select([known.pidfd], [], [], 0)[0]:
                self._died(name, known)

    def _died(self, name: str, known: _Peer) -> None:
        error = nixlRemoteDisconnectError(f"{name!r}: process ended")
        with self._lock:
            del self._peers[name]
            self._lost[name] = error
        self._forget(name, known, error)
        self.state.lost(name, known.generation)

    def _forget(self, name: str, known: _Peer, error: Exception) -> None:
        with self._lock:
            mine = [t for t in self._active if (t.peer, t.generation) == (name, known.generation)]
            for transfer in mine:
                handle = self._active.pop(transfer)
                if handle is not None:
                    with contextlib.suppress(Exception):
                        handle.release()
            if known.pidfd >= 0:
                os.close(known.pidfd)
                known.pidfd = -1
            self._agent.remove_remote_agent(known.place.unique)
        for transfer in mine:
            self.state.finished(transfer, error)

    def _translate(self, call: Any) -> None:
        try:
            call()
        except Exception as failure:
            raise _ours(failure) from failure


def _decode(connection: bytes) -> _Place:
    try:
        return msgspec.msgpack.decode(connection, type=_Place)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise nixlMismatchError(f"not an address: {error}") from error


def _ours(failure: Exception) -> Exception:
    """Upstream's exception as ours of the same name."""
    kind = getattr(errors, type(failure).__name__, nixlBackendError)
    return kind(str(failure)) if isinstance(kind, type) else nixlBackendError(str(failure))
