"""The worker's end of the page transfers: carries out WritePages and Notify over a `pd_transfer`
agent.

All methods but the agent's callback run in the worker's own thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pd_cluster.cache.layout import Layout
from pd_cluster.errors import StartError, WireError
from pd_cluster.observability.snapshots import WORK_BUCKETS, Histogram
from pd_cluster.types import (
    CHECKSUM_BYTES,
    FirstToken,
    Message,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Region,
    StartPrefill,
    WorkerId,
    decode,
    encode,
    unpack_ints,
)
from pd_cluster.worker.checksums import page_checksums
from pd_cluster.worker.instructions import (
    CORRUPT,
    AbortTransfer,
    Connect,
    Event,
    Notify,
    PagesCorrupt,
    PeerLost,
    ReadPages,
    TransferEnded,
    VerifyPages,
    WritePages,
)
from pd_cluster.worker.transfer_queue import Portion, TransferQueue
from pd_transfer import Event as AgentEvent
from pd_transfer import (
    nixl_agent,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

logger = logging.getLogger(__name__)

# Writes whose times are kept for who asks: a few say enough.
MAX_TOLD = 32


@dataclass(eq=False)
class _Peer:
    """`rows` are of the peer's pool of `num_pages` pages."""

    rows: nixl_prepped_dlist_handle
    num_pages: int
    queue: TransferQueue


@dataclass(eq=False)
class _Move:
    """A WritePages or ReadPages under way, and its portions in flight."""

    order: WritePages | ReadPages
    peer: _Peer
    started: float
    handles: dict[int, nixl_xfer_handle] = field(default_factory=dict)
    over: float = 0.0


class Transport:
    """Pages of `layout` to and from peers. The agent's name is the worker's id.

    Args:
        max_inflight_bytes: to and from one peer at once; requests take turns.
        verify: pages travel with checksums, and count as moved only where these hold.

    Raises:
        StartError: the agent cannot move memory like the layout's.
    """

    def __init__(
        self,
        agent: nixl_agent,
        layout: Layout,
        on_event: Callable[[AgentEvent], None],
        *,
        max_inflight_bytes: int,
        verify: bool = False,
    ) -> None:
        self.agent = agent
        self.layout = layout
        self.verify = verify
        try:
            self.registered = agent.register_memory([(*layout.region(), "")], layout.mem_type)
        except (nixlBackendError, nixlNotFoundError) as error:
            raise StartError(
                f"the KV pool in {layout.mem_type} cannot be moved: {error}"
            ) from error
        self.metadata = agent.get_agent_metadata()
        self._local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", layout.descriptors(), layout.mem_type
        )
        self._max_pages = max(1, max_inflight_bytes // layout.page_bytes)
        self._peers: dict[str, _Peer] = {}
        self.seconds = Histogram(WORK_BUCKETS)  # of transfers that succeeded
        # (peer, pages, seconds) of the last writes that did.
        self._written: deque[tuple[WorkerId, int, float]] = deque(maxlen=MAX_TOLD)
        self._moves: dict[int, _Move] = {}
        self._portions: dict[int, Portion] = {}
        self._over: dict[int, float] = {}

        def note(event: AgentEvent) -> None:
            # In the agent's thread: the worker's own may be in the middle of a step.
            if event.kind == "transfer":
                self._over[event.handle] = time.perf_counter()
            on_event(event)

        agent.set_event_callback(note)

    def connect(self, instruction: Connect) -> None:
        """Loads a peer once; a known one costs nothing."""
        name = str(instruction.peer)
        if name in self._peers:
            return
        self.agent.add_remote_agent(instruction.agent)
        region: Region = instruction.region
        blocks = self.layout.descriptors(region)
        remote = self.agent.prep_xfer_dlist(name, blocks, self._mem_type(name, region))
        num_pages = region[1] // self.layout.page_bytes
        self._peers[name] = _Peer(remote, num_pages, TransferQueue(self._max_pages))

    def _mem_type(self, peer: str, region: Region) -> str:
        """Where a peer has its pool: on a GPU or not, whatever this worker has."""
        in_vram = self.agent.get_xfer_descs([region], "VRAM")
        return "VRAM" if self.agent.check_remote_metadata(peer, in_vram) else "DRAM"

    def move(self, instruction: WritePages | ReadPages) -> list[Event]:
        """Starts a write or a read. Returns the ends of transfers that could not even start."""
        peer = self._peers.get(str(instruction.peer))
        transfer = instruction.transfer
        if peer is None:
            return [TransferEnded(transfer, "peer lost")]
        self._moves[transfer] = _Move(instruction, peer, time.perf_counter())
        peer.queue.add(transfer, instruction.attempt, len(instruction.source))
        return self._pump(peer)

    def abort(self, instruction: AbortTransfer) -> list[Event]:
        """Its end comes when nothing of it can land any more: at once, if nothing has begun."""
        move = self._moves.get(instruction.transfer)
        if move is None:
            return []
        for handle in move.handles.values():
            self.agent.abort(handle)
        return self._end(
            instruction.transfer, move.peer.queue.stop(instruction.transfer, "aborted")
        )

    def seal(self, message: Message) -> Message:
        """A message to another worker, with checksums of the pages that it may read from here."""
        if not self.verify or not isinstance(message, StartPrefill) or not message.held:
            return message
        held = unpack_ints(message.held)
        return msgspec.structs.replace(message, held_checksums=page_checksums(self.layout, held))

    def check(self, instruction: VerifyPages) -> Event:
        """What PagesWritten said, once its pages are found as they were sent."""
        message = instruction.message
        if page_checksums(self.layout, instruction.pages) == message.checksums:
            return msgspec.structs.replace(message, checksums=b"")
        return PagesCorrupt(message.attempt)

    def _pump(self, peer: _Peer) -> list[Event]:
        """Starts what may be in flight now."""
        out: list[Event] = []
        while (portion := peer.queue.next()) is not None:
            move = self._moves[portion.transfer]
            try:
                self._start(move, portion)
            except (nixlNotFoundError, nixlRemoteDisconnectError):
                out += self._end(portion.transfer, peer.queue.ended(portion, "peer lost"))
        return out

    def _start(self, move: _Move, portion: Portion) -> None:
        """
        Raises:
            nixlNotFoundError: the peer was forgotten.
            nixlRemoteDisconnectError: it died.
        """
        order, part = move.order, slice(portion.first, portion.first + portion.pages)
        writes = isinstance(order, WritePages)
        local, remote = order.source[part], order.target[part]
        notification = b""
        if isinstance(order, WritePages):
            done = msgspec.structs.replace(
                order.done, first=order.done.first + portion.first, count=portion.pages
            )
            if self.verify:
                checksums = page_checksums(self.layout, local)
                done = msgspec.structs.replace(done, checksums=checksums)
            notification = encode(done)
        else:
            local, remote = remote, local
        handle = self.agent.make_prepped_xfer(
            "WRITE" if writes else "READ",
            self._local,
            self.layout.rows(local),
            move.peer.rows,
            self.layout.rows(remote, move.peer.num_pages),
            notification,
        )
        try:
            self.agent.transfer(handle)
        except (nixlNotFoundError, nixlRemoteDisconnectError):
            self.agent.release_xfer_handle(handle)
            raise
        move.handles[int(handle)] = handle
        self._portions[int(handle)] = portion

    def notify(self, instruction: Notify) -> bool:
        """False where the peer is not connected or gone."""
        try:
            self.agent.send_notif(str(instruction.peer), encode(instruction.message))
        except (nixlNotFoundError, nixlRemoteDisconnectError):
            return False
        return True

    def translate(self, event: AgentEvent) -> list[Event]:
        """What an event of the agent means to the scheduler."""
        if event.kind == "notification":
            return self._notifications()
        if event.kind == "peer":
            name, _, incarnation = event.peer.rpartition("@")
            self.forget(event.peer)
            return [PeerLost(WorkerId(name, incarnation))]
        portion = self._portions.get(event.handle)
        if portion is None:
            return []
        try:
            state = self.agent.check_xfer_state(self._moves[portion.transfer].handles[event.handle])
        except Exception as error:  # NIXL's errors have no common base
            return self._portion_ended(event.handle, type(error).__name__)
        return self._portion_ended(event.handle, "") if state == "DONE" else []

    def take_written(self) -> list[tuple[WorkerId, int, float]]:
        """(peer, pages, seconds) of writes that succeeded since the last call, the last few."""
        written = list(self._written)
        self._written.clear()
        return written

    def forget(self, name: str) -> None:
        """A peer's process is dead."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self.agent.release_dlist_handle(peer.rows)
            self.agent.remove_remote_agent(name)

    def _portion_ended(self, handle_id: int, error: str) -> list[Event]:
        portion = self._portions.pop(handle_id)
        move = self._moves[portion.transfer]
        self.agent.release_xfer_handle(move.handles.pop(handle_id))
        move.over = max(move.over, self._over.pop(handle_id, 0.0))
        if not error and not self._arrived_whole(move.order, portion):
            error = CORRUPT
        ended = self._end(portion.transfer, move.peer.queue.ended(portion, error))
        return ended + self._pump(move.peer)

    def _arrived_whole(self, order: WritePages | ReadPages, portion: Portion) -> bool:
        """Whether what was read is what the peer had; of a write, it is the peer who looks."""
        if isinstance(order, WritePages) or not self.verify or not order.checksums:
            return True
        first, last = portion.first, portion.first + portion.pages
        found = page_checksums(self.layout, order.target[first:last])
        return found == order.checksums[first * CHECKSUM_BYTES : last * CHECKSUM_BYTES]

    def _end(self, transfer: int, error: str | None) -> list[Event]:
        """The end of a transfer, if its queue says so."""
        if error is None:
            return []
        move = self._moves.pop(transfer)
        if not error and move.over:
            seconds = move.over - move.started
            self.seconds.observe(seconds)
            if isinstance(move.order, WritePages):
                self._written.append((move.order.peer, len(move.order.source), seconds))
        return [TransferEnded(transfer, error)]

    def _notifications(self) -> list[Event]:
        events: list[Event] = []
        for sender, messages in self.agent.get_new_notifs().items():
            for data in messages:
                try:
                    kinds = (PagesWritten, FirstToken, PrefillFailed, PrefillAborted)
                    events.append(decode(data, kinds))
                except WireError as error:
                    logger.warning("ignored a notification from %s: %s", sender, error)
        return events
