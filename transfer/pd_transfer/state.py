"""What an agent and its backend share: peers, notifications, events, counters."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pd_transfer.cuda import device_memory
from pd_transfer.descriptors import Rows
from pd_transfer.enums import nixl_mem_t, nixl_xfer_op_t
from pd_transfer.errors import nixlCancelledError
from pd_transfer.metadata import Metadata
from pd_transfer.regions import HOST, Place, RegionTable, Vector
from pd_transfer.runs import Runs, copy
from pd_transfer.telemetry import CostModel

logger: Final = logging.getLogger("pd_transfer")

_PAUSE: Final = 250e-6
_LONG_PAUSE: Final = 1e-3

PeerState = Literal["alive", "dead"]
EventKind = Literal["notification", "transfer", "peer"]


@dataclass(frozen=True)
class Statistics:
    """Counts since the agent was made. Descriptors are counted as given, runs after merging.

    `written` and `read` are this agent's finished operations, `received` and `served` what peers
    wrote to and read from it. A transfer that failed or was aborted counts in neither.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_served: int = 0
    descriptors_written: int = 0
    descriptors_read: int = 0
    descriptors_received: int = 0
    descriptors_served: int = 0
    runs_written: int = 0
    runs_read: int = 0
    runs_received: int = 0
    runs_served: int = 0
    notifications_sent: int = 0
    notifications_received: int = 0
    handles_open: int = 0
    transfers_active: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    transfers_aborted: int = 0
    peers_lost: int = 0


class Event(NamedTuple):
    """Something the application may want to act on.

    `handle` is ``int(handle)`` of the transfer that ended, 0 for the other kinds.
    """

    kind: EventKind
    peer: str
    handle: int = 0


@dataclass(eq=False)
class Transfer:
    """One post of a handle. The backend ends it by `State.finished`, exactly once."""

    operation: nixl_xfer_op_t
    peer: str
    generation: bytes
    runs: Runs
    descriptors: int
    local_regions: list[int]
    remote_regions: list[int]
    notification: bytes | None
    handle: int
    local_place: Place = HOST
    remote_place: Place = HOST
    ended: bool = False
    error: Exception | None = None
    # Held until the end; made by who first waits. Not an Event, which wakes its waiters while it
    # still holds what they need to go on.
    waiter: threading.Lock | None = None
    # Monotonic seconds: `transfer` was called, had returned, the end.
    posted_at: float = 0.0
    returned_at: float = 0.0
    ended_at: float = 0.0

    def posted(self, at: float) -> Transfer:
        """A post of what this is the template of."""
        post = Transfer.__new__(Transfer)
        post.__dict__.update(self.__dict__, posted_at=at)  # dataclasses.replace takes 5 us
        return post

    @property
    def on_device(self) -> bool:
        """Whether a GPU's memory is at either end."""
        return not (self.local_place is HOST and self.remote_place is HOST)


class Peer(NamedTuple):
    """A peer's metadata. `epoch` tells a peer that was removed and added again from before."""

    metadata: Metadata
    epoch: int


@dataclass(eq=False)
class State:
    """Shared by the application's threads and the backend's; all methods are safe from any."""

    name: str
    generation: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    regions: RegionTable = field(default_factory=RegionTable)
    peers: dict[str, Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.callback: Callable[[Event], None] | None = None
        self._notifications: dict[str, list[bytes]] = {}
        self._counts: dict[str, int] = dict(vars(Statistics()))
        self._paused = 0.0
        self._paused_for: Transfer | None = None
        self.costs: dict[str, CostModel] = {}

    # What the backend reports.

    def notified(self, peer: str, message: bytes) -> None:
        with self.lock:
            self._notifications.setdefault(peer, []).append(message)
            self._counts["notifications_received"] += 1
        self._emit("notification", peer)

    def finished(self, transfer: Transfer, error: Exception | None = None) -> None:
        assert not transfer.ended
        self.regions.release(transfer.local_regions)
        now = time.monotonic()
        with self.lock:
            self._counts["transfers_active"] -= 1
            if error is None:
                reading = transfer.operation == nixl_xfer_op_t.NIXL_READ
                self._moved("read" if reading else "written", transfer.runs, transfer.descriptors)
                self._counts["transfers_done"] += 1
                self._counts["notifications_sent"] += bool(transfer.notification)
                cost = self.costs.get(transfer.peer)
                if cost is None:
                    cost = self.costs[transfer.peer] = CostModel()
                cost.learn(transfer.runs.nbytes, now - transfer.posted_at)
            else:
                aborted = isinstance(error, nixlCancelledError)
                self._counts["transfers_aborted" if aborted else "transfers_failed"] += 1
        transfer.ended_at = now
        transfer.error = error
        transfer.ended = True
        if transfer.waiter is not None:
            transfer.waiter.release()
        self._emit("transfer", transfer.peer, transfer.handle)

    def served(self, operation: nixl_xfer_op_t, runs: Runs, descriptors: int) -> None:
        done = "served" if operation == nixl_xfer_op_t.NIXL_READ else "received"
        with self.lock:
            self._moved(done, runs, descriptors)

    def lost(self, peer: str, generation: bytes) -> None:
        """The peer is dead and nothing from it can land any more."""
        with self.lock:
            known = self.peers.get(peer)
            if known is not None and known.metadata.generation == generation:
                del self.peers[peer]
        self.count(peers_lost=1)
        self._emit("peer", peer)

    # What the agent asks.

    def take_notifications(self) -> dict[str, list[bytes]]:
        with self.lock:
            taken, self._notifications = self._notifications, {}
        return taken

    def count(self, **changes: int) -> None:
        with self.lock:
            for name, change in changes.items():
                self._counts[name] += change

    def pause(self, transfer: Transfer, wait: Callable[[Transfer, float], bool]) -> None:
        """Wait a moment for its end, unless somebody has just waited for another's.

        A caller that asks in a loop would keep the GIL from the agent's thread, for which it is
        waiting, for 5 ms at a time. One that asks about many transfers is held up for one of them,
        not for each.
        """
        now = time.monotonic()
        # What has taken long may take longer: then waking up often costs more than it gains.
        pause = min(max(_PAUSE, (now - transfer.posted_at) / 8), _LONG_PAUSE)
        other = self._paused_for
        waiting = other is not None and other is not transfer and not other.ended
        if waiting and now - self._paused < pause:
            return
        self._paused_for = transfer
        if not wait(transfer, pause):
            if transfer.waiter is None:
                waiter = threading.Lock()
                waiter.acquire()
                transfer.waiter = waiter
            if not transfer.ended and transfer.waiter.acquire(timeout=pause):
                transfer.waiter.release()  # for others that wait
        self._paused = time.monotonic()

    def statistics(self) -> Statistics:
        with self.lock:
            return Statistics(**self._counts)

    def _moved(self, how: str, runs: Runs, descriptors: int) -> None:
        """With the lock held."""
        self._counts["bytes_" + how] += runs.nbytes
        self._counts["descriptors_" + how] += descriptors
        self._counts["runs_" + how] += len(runs.lengths)

    def _emit(self, kind: EventKind, peer: str, handle: int = 0) -> None:
        callback = self.callback
        if callback is None:
            return
        try:
            callback(Event(kind, peer, handle))
        except Exception:
            # The application's mistake must not end the thread that moves everybody's data.
            logger.exception("the event callback of agent %r failed", self.name)


class Backend(ABC):
    """How bytes move. One per agent; every method may be called from any thread."""

    kind: str
    """By NIXL's name, for callers."""
    wire_name: str
    """What both sides of a transfer must have in common."""
    host: str = "127.0.0.1"
    """Where this agent may be spoken to."""

    def memory_types(self) -> list[nixl_mem_t]:
        """What may be registered."""
        return [nixl_mem_t.DRAM_SEG]

    def register(self, kind: nixl_mem_t, rows: Rows) -> None:  # noqa: B027
        """Memory of one of `memory_types` is being registered, and comes to `State.regions` next.

        Raises:
            nixlInvalidParamError: it is not such memory.
            nixlBackendError: nothing could move it.
        """

    def deregister(self, kind: nixl_mem_t, rows: Rows) -> None:  # noqa: B027
        """Memory has been taken back."""

    def copy(self, transfer: Transfer, sources: Vector, targets: Vector) -> None:
        """Within this agent, both ends of a transfer being its own.

        Raises:
            nixlBackendError: it failed.
        """
        if transfer.on_device:
            places = (transfer.local_place, transfer.remote_place)
            device = next(place.device for place in places if place is not HOST)
            device_memory(device).copy(sources, targets, transfer.runs.lengths)
        else:
            copy(sources, targets, transfer.runs.lengths)

    def same_place(self, one: bytes | None, other: bytes | None) -> bool:
        """Whether two `Metadata.connection` reach the same agent."""
        return one is None or other is None or one == other

    def refresh(self, peer: Metadata) -> None:  # noqa: B027
        """A known peer's newer metadata was loaded."""

    @abstractmethod
    def connection(self) -> bytes:
        """What a peer's backend needs to reach this one."""

    @abstractmethod
    def connect(self, peer: Metadata) -> None:
        """Start to reach a peer; transfers may be posted at once.

        Raises:
            nixlMismatchError: `peer.connection` cannot be read.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Abort all transfers to the peer and forget it."""

    @abstractmethod
    def post(self, transfer: Transfer) -> None: ...

    def wait(self, transfer: Transfer, seconds: float) -> bool:
        """Wait for news of its peer, and take them in the caller's thread.

        False, at once, where only the backend's own thread takes them.
        """
        return False

    @abstractmethod
    def abort(self, transfer: Transfer) -> None:
        """Stop what can be stopped; the transfer ends when nothing of it can land any more."""

    @abstractmethod
    def notify(self, peer: str, message: bytes) -> None: ...

    @abstractmethod
    def peer_state(self, peer: str) -> PeerState | None:
        """None: never heard of."""

    @abstractmethod
    def why_lost(self, peer: str) -> Exception | None:
        """Why a peer is dead, as the exception for who uses it; None if it is not."""

    @abstractmethod
    def peer_is_quiet(self, peer: str) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...
