"""The worker's end of the page transfers: carries out WritePages and Notify over a `pd_transfer`
agent.

All methods but the agent's callback run in the worker's own thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pd_cluster.cache.layout import Layout
from pd_cluster.errors import WireError
from pd_cluster.observability.snapshots import WORK_BUCKETS, Histogram
from pd_cluster.types import (
    FirstToken,
    IntArray,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Region,
    WorkerId,
    decode,
    encode,
)
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Connect,
    Event,
    Notify,
    PeerLost,
    ReadPages,
    TransferEnded,
    WritePages,
)
from pd_transfer import Event as AgentEvent
from pd_transfer import (
    nixl_agent,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

logger = logging.getLogger(__name__)


class Transport:
    """Pages of `layout` to and from peers. The agent's name is the worker's id."""

    def __init__(
        self, agent: nixl_agent, layout: Layout, on_event: Callable[[AgentEvent], None]
    ) -> None:
        self.agent = agent
        self.layout = layout
        self.registered = agent.register_memory([(*layout.region(), "")], "DRAM")
        self.metadata = agent.get_agent_metadata()
        self._local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", layout.descriptors(), "DRAM")
        self._peers: dict[str, tuple[nixl_prepped_dlist_handle, int]] = {}
        self.seconds = Histogram(WORK_BUCKETS)  # of transfers that succeeded
        self._started: dict[int, float] = {}
        self._over: dict[int, float] = {}
        self._active: dict[int, tuple[int, nixl_xfer_handle]] = {}
        self._handles: dict[int, nixl_xfer_handle] = {}

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
        remote = self.agent.prep_xfer_dlist(name, self.layout.descriptors(region), "DRAM")
        self._peers[name] = (remote, region[1] // self.layout.page_bytes)

    def write(self, instruction: WritePages) -> list[Event]:
        """Starts a write. Returns its end at once if it cannot even start."""
        return self._start(
            "WRITE",
            instruction.transfer,
            instruction.peer,
            local=instruction.source,
            remote=instruction.target,
            notification=encode(instruction.done),
        )

    def read(self, instruction: ReadPages) -> list[Event]:
        """Starts a read. Returns its end at once if it cannot even start."""
        return self._start(
            "READ",
            instruction.transfer,
            instruction.peer,
            local=instruction.target,
            remote=instruction.source,
        )

    def _start(
        self,
        operation: str,
        transfer: int,
        peer: WorkerId,
        *,
        local: IntArray,
        remote: IntArray,
        notification: bytes = b"",
    ) -> list[Event]:
        known = self._peers.get(str(peer))
        if known is None:
            return [TransferEnded(transfer, "peer lost")]
        side, num_pages = known
        try:
            handle = self.agent.make_prepped_xfer(
                operation,
                self._local,
                self.layout.rows(local),
                side,
                self.layout.rows(remote, num_pages),
                notification,
            )
        except nixlNotFoundError:
            return [TransferEnded(transfer, "peer lost")]
        self._active[int(handle)] = (transfer, handle)
        self._handles[transfer] = handle
        self._started[int(handle)] = time.perf_counter()
        try:
            self.agent.transfer(handle)
        except (nixlNotFoundError, nixlRemoteDisconnectError):
            return [self._ended(int(handle), "peer lost")]
        return []

    def abort(self, instruction: AbortTransfer) -> None:
        handle = self._handles.get(instruction.transfer)
        if handle is not None:
            self.agent.abort(handle)

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
        active = self._active.get(event.handle)
        if active is None:
            return []
        try:
            state = self.agent.check_xfer_state(active[1])
        except Exception as error:  # NIXL's errors have no common base
            return [self._ended(event.handle, type(error).__name__)]
        return [self._ended(event.handle, "")] if state == "DONE" else []

    def forget(self, name: str) -> None:
        """A peer's process is dead."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self.agent.release_dlist_handle(peer[0])
            self.agent.remove_remote_agent(name)

    def _ended(self, handle_id: int, error: str) -> TransferEnded:
        transfer, handle = self._active.pop(handle_id)
        del self._handles[transfer]
        started, over = self._started.pop(handle_id), self._over.pop(handle_id, None)
        if not error and over is not None:
            self.seconds.observe(over - started)
        self.agent.release_xfer_handle(handle)
        return TransferEnded(transfer, error)

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
