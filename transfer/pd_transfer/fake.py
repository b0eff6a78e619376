"""An in-memory backend for tests: everything at once, or by hand and with faults.

Agents find each other through the `FakeNetwork` that they were made with. By default a transfer
ends and a notification arrives inside the call that started it. While `hold` is set they wait in
`pending` until the test delivers or drops them, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_transfer.enums import nixl_mem_t, nixl_xfer_op_t
from pd_transfer.errors import (
    nixlCancelledError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from pd_transfer.metadata import Metadata
from pd_transfer.regions import Vector
from pd_transfer.runs import copy, view
from pd_transfer.state import Backend, PeerState, State, Transfer


@dataclass(eq=False)
class Pending:
    """A transfer (`transfer` set), or a notification sent by itself (`message` set)."""

    source: str
    target: str
    transfer: Transfer | None = None
    message: bytes = b""
    aborting: bool = False


class FakeNetwork:
    """What lies between fake agents, with faults on demand. For one thread at a time.

    Attributes:
        hold: transfers, notifications and aborts wait in `pending` instead of happening.
        pending: what waits, oldest first. An aborted transfer stays, with `aborting` set, until it
            is delivered, which then is the target's acknowledgement.
        corrupt: of how many more transfers one byte arrives changed.
    """

    def __init__(self) -> None:
        self.hold = False
        self.corrupt = 0
        self.pending: list[Pending] = []
        self._agents: dict[str, FakeBackend] = {}

    def deliver(self, pending: Pending | None = None) -> None:
        """Let one held item happen, the oldest if none is named."""
        item = self.pending[0] if pending is None else pending
        self.pending.remove(item)
        self._happen(item)

    def deliver_all(self) -> None:
        while self.pending:
            self.deliver()

    def drop(self, pending: Pending) -> None:
        """Lose one held item: a transfer fails as on a broken connection, a message is gone."""
        self.pending.remove(pending)
        if pending.transfer is not None:
            error = nixlRemoteDisconnectError(f"lost on the way to {pending.target!r}")
            self._agents[pending.source].state.finished(pending.transfer, error)

    def kill(self, name: str) -> None:
        """End an agent as if its process had died: nothing of it happens any more."""
        victim = self._agents.pop(name)
        victim.alive = False
        for item in [item for item in self.pending if name in (item.source, item.target)]:
            self.pending.remove(item)
            if item.transfer is not None and item.source != name:
                error = nixlRemoteDisconnectError(f"{name!r} died")
                self._agents[item.source].state.finished(item.transfer, error)
        for other in list(self._agents.values()):
            if name in other.links:
                generation = other.links.pop(name)
                other.dead.add(name)
                other.state.lost(name, generation)

    def _join(self, backend: FakeBackend) -> None:
        if backend.state.name in self._agents:
            raise ValueError(f"an agent named {backend.state.name!r} is on this network already")
        self._agents[backend.state.name] = backend

    def _start(self, item: Pending) -> None:
        if self.hold:
            self.pending.append(item)
        else:
            self._happen(item)

    def _happen(self, item: Pending) -> None:
        source = self._agents[item.source]
        target = self._agents.get(item.target)
        transfer = item.transfer
        if transfer is None:
            if target is not None:
                self._meet(source, target)
                target.state.notified(item.source, item.message)
            return
        if item.aborting:
            source.state.finished(transfer, nixlCancelledError("aborted"))
        elif target is None:
            error = nixlRemoteDisconnectError(f"{item.target!r} is dead")
            source.state.finished(transfer, error)
        else:
            source.state.finished(transfer, self._serve(source, target, transfer))

    def _serve(
        self, source: FakeBackend, target: FakeBackend, transfer: Transfer
    ) -> Exception | None:
        if target.state.generation != transfer.generation:
            return nixlNotFoundError(f"{transfer.peer!r} has been restarted since")
        if target.secret != source.secret:
            return nixlNotAllowedError(f"{transfer.peer!r} refused the secret")
        self._meet(source, target)
        runs, regions = transfer.runs, target.state.regions
        try:
            regions.admit(transfer.remote_regions, runs.remote, runs.lengths)
        except nixlNotFoundError as refusal:
            return refusal
        origin, landing = runs.local, runs.remote
        if transfer.operation == nixl_xfer_op_t.NIXL_READ:
            origin, landing = landing, origin
        copy(origin, landing, runs.lengths)
        if self.corrupt and len(landing):
            self.corrupt -= 1
            view(int(landing[-1]), 1)[0] ^= 0xFF
        regions.release(transfer.remote_regions)
        target.state.served(transfer.operation, runs, transfer.descriptors)
        if transfer.notification is not None:
            target.state.notified(source.state.name, transfer.notification)
        return None

    def _meet(self, source: FakeBackend, target: FakeBackend) -> None:
        """The target learns of a source that has reached it."""
        target.links[source.state.name] = source.state.generation
        target.dead.discard(source.state.name)


class FakeBackend(Backend):
    kind = "UCX"  # code that names the backend must run on the fake one too
    wire_name = "fake"

    def __init__(self, state: State, network: FakeNetwork, secret: bytes | None) -> None:
        self.state = state
        self.secret = secret
        self.alive = True
        self.links: dict[str, bytes] = {}
        self.dead: set[str] = set()
        self._network = network
        network._join(self)

    def memory_types(self) -> list[nixl_mem_t]:
        """VRAM is the host's memory, described as a GPU's."""
        return [nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG]

    def copy(self, transfer: Transfer, sources: Vector, targets: Vector) -> None:
        copy(sources, targets, transfer.runs.lengths)

    def connection(self) -> bytes:
        return b""

    def connect(self, peer: Metadata) -> None:
        self.links[peer.name] = peer.generation
        self.dead.discard(peer.name)

    def disconnect(self, peer: str) -> None:
        mine = [
            item
            for item in self._network.pending
            if (item.source, item.target) == (self.state.name, peer)
        ]
        for item in mine:
            self._network.pending.remove(item)
            if item.transfer is not None:
                self.state.finished(item.transfer, nixlCancelledError("the peer was removed"))
        self.links.pop(peer, None)

    def post(self, transfer: Transfer) -> None:
        self._check_alive()
        self._network._start(Pending(self.state.name, transfer.peer, transfer))

    def abort(self, transfer: Transfer) -> None:
        for item in self._network.pending:
            if item.transfer is transfer:
                item.aborting = True
                if not self._network.hold:
                    self._network.deliver(item)
                return

    def notify(self, peer: str, message: bytes) -> None:
        self._check_alive()
        self._network._start(Pending(self.state.name, peer, message=message))

    def peer_state(self, peer: str) -> PeerState | None:
        if peer in self.links:
            return "alive"
        return "dead" if peer in self.dead else None

    def why_lost(self, peer: str) -> Exception | None:
        return nixlRemoteDisconnectError(f"{peer!r} died") if peer in self.dead else None

    def peer_is_quiet(self, peer: str) -> bool:
        return peer not in self.links

    def close(self) -> None:
        if self.alive:
            self._network.kill(self.state.name)

    def _check_alive(self) -> None:
        if not self.alive:
            raise nixlRemoteDisconnectError(f"agent {self.state.name!r} is closed")
