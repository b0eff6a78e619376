"""`nixl_agent`: NIXL's Python API on our backends."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pd_transfer import metadata as wire_metadata
from pd_transfer.config import nixl_agent_config
from pd_transfer.descriptors import nixlRegDList, nixlXferDList, reg_descs, xfer_descs
from pd_transfer.enums import (
    MEMORY_TYPES,
    OPERATIONS,
    nixl_mem_t,
    nixl_xfer_op_t,
)
from pd_transfer.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRepostActiveError,
)
from pd_transfer.handles import nixl_prepped_dlist_handle, nixl_xfer_handle
from pd_transfer.metadata import Metadata
from pd_transfer.regions import locate
from pd_transfer.runs import copy, merge
from pd_transfer.state import Backend, Event, Peer, PeerState, State, Statistics, Transfer

logger: Final = logging.getLogger(__name__)

Indices = list[int] | npt.NDArray[np.int64]


@dataclass(eq=False)
class _Prepared:
    """What a transfer handle stands for: the transfer to post, and its latest post."""

    template: Transfer
    epoch: int
    post: Transfer | None = None


class nixl_agent:
    """NIXL's agent, the subset that a prefill-to-decode KV path needs, plus extensions.

    Differences from upstream, all on the safe side:

    - everything progresses by the agent's own thread: a notification leaves without polling;
    - misuse raises, where upstream logs and returns None; a released handle raises on use;
    - registered memory that a transfer still uses cannot be deregistered;
    - ``"ERR"`` is never returned: failures are raised, as upstream does in practice.

    All methods may be called from any thread, also from the event callback.

    Args:
        agent_name: unique among the agents that meet.
        nixl_conf: see `nixl_agent_config`.
        instantiate_all: refused with `nixlNotSupportedError`; there is one backend an agent.
        secret: what transfer connections must prove to know. Without one, the agent makes its own
            and puts it in its metadata: whoever has the metadata may write, as upstream.
        open_backend: builds the backend; UCX if left out. See `pd_transfer.agent`.

    Raises:
        ValueError: empty name or secret.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
        *,
        secret: bytes | None = None,
        open_backend: Callable[[State], Backend] | None = None,
    ) -> None:
        if not agent_name:
            raise ValueError("an agent needs a name")
        if secret is not None and not secret:
            raise ValueError("an empty secret protects nothing: leave it out or give one")
        config = nixl_conf or nixl_agent_config()
        if instantiate_all or config.enable_listen or config.capture_telemetry:
            raise nixlNotSupportedError("no metadata listener, telemetry or second backend yet")
        if open_backend is None:
            # Imported late: the fake backend must work where UCX is not installed.
            from pd_transfer.ucx import UcxBackend, UcxOptions

            options = UcxOptions()

            def open_backend(state: State) -> Backend:
                return UcxBackend(state, options, secret)

        self.name = agent_name
        self.nixl_mems = MEMORY_TYPES
        self.nixl_ops = OPERATIONS
        self._state = State(agent_name)
        self._backend = open_backend(self._state)
        self.backends = {self._backend.kind: self._backend}
        self._ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self._prepared: dict[int, _Prepared] = {}
        # Not a __del__: it also runs at interpreter exit, before modules are torn down.
        self._finalizer = weakref.finalize(self, self._backend.close)

    # Memory.

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """Descriptors to register.

        Args:
            descs: a ready list; 4-tuples (address, bytes, device, meta) or an Nx3 (u)int64 array,
                both with `mem_type`; a contiguous tensor or a list of such on one device.
            mem_type: "DRAM" (or another of NIXL's names; only DRAM can be registered yet).

        Raises:
            nixlInvalidParamError: misuse; upstream logs and returns None.
            KeyError: unknown `mem_type`.
        """
        return reg_descs(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """Descriptors to transfer: as `get_reg_descs`, with 3-tuples."""
        return xfer_descs(descs, mem_type)

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList:
        """Let peers that were given later metadata write to and read from this memory.

        The memory must stay mapped until it is deregistered.

        Raises:
            nixlNotFoundError: no backend for this memory type.
        """
        self._check_backends(backends)
        descs = reg_descs(reg_list, mem_type)
        if descs.getType() != nixl_mem_t.DRAM_SEG:
            raise nixlNotFoundError(f"no backend registers {descs.getType().name}")
        self._state.regions.add(descs.getType(), descs.rows)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Take back what was registered, all or nothing. Nothing lands there after it returns.

        Raises:
            nixlNotFoundError: not registered like this.
            nixlNotAllowedError: a transfer still uses it.
        """
        self._check_backends(backends)
        self._state.regions.remove(dereg_list.getType(), dereg_list.rows)

    # Metadata.

    def get_agent_metadata(self) -> bytes:
        """A snapshot for `add_remote_agent` elsewhere: register memory before."""
        return wire_metadata.encode(
            Metadata(
                version=wire_metadata.VERSION,
                name=self.name,
                generation=self._state.generation,
                backend=self._backend.kind,
                connection=self._backend.connection(),
                regions=self._state.regions.snapshot(),
            )
        )

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Load a peer's metadata and start connecting. Loading newer metadata of it is legal.

        Returns:
            The peer's name as bytes, as upstream's binding does.

        Raises:
            nixlMismatchError: not metadata, or of another version.
            nixlInvalidParamError: this agent's own.
            nixlBackendError: no common backend.
            nixlNotAllowedError: another agent of the same name is loaded; remove that first.
        """
        loaded = wire_metadata.decode(metadata)
        if loaded.name == self.name:
            raise nixlInvalidParamError("an agent is not its own remote agent")
        if loaded.backend != self._backend.kind:
            raise nixlBackendError(f"{loaded.name!r} speaks {loaded.backend} only")
        with self._state.lock:
            known = self._state.peers.get(loaded.name)
            if known is None:
                self._backend.connect(loaded)
                self._state.peers[loaded.name] = Peer(loaded, next(self._epochs))
            elif (known.metadata.generation, known.metadata.connection) != (
                loaded.generation,
                loaded.connection,
            ):
                raise nixlNotAllowedError(f"another agent named {loaded.name!r} is loaded")
            else:
                self._state.peers[loaded.name] = Peer(loaded, known.epoch)
        return loaded.name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Abort what is under way to the peer and forget it. Never raises, as upstream."""
        with self._state.lock:
            if self._state.peers.pop(_name(agent), None) is not None:
                self._backend.disconnect(_name(agent))

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Whether the peer is loaded and, if given, its metadata covers `descs`."""
        peer = self._state.peers.get(_name(agent))
        if peer is None:
            return False
        if descs is not None:
            try:
                locate(peer.metadata.regions, descs.getType(), descs.rows)
            except nixlNotFoundError:
                return False
        return True

    # Transfers.

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Resolve one side of coming transfers, e.g. a whole page pool, once.

        Args:
            agent_name: "NIXL_INIT_AGENT" or "" for this agent's local side, its own name for the
                remote side of a loopback, else a peer.

        Raises:
            nixlNotFoundError: unknown agent, or a descriptor in no single registered region.
        """
        self._check_backends(backends)
        descs = xfer_descs(xfer_list, mem_type)
        peer, epoch = _name(agent_name), 0
        if peer in ("NIXL_INIT_AGENT", "", self.name):
            regions = self._state.regions.snapshot()
        else:
            known = self._peer(peer)
            regions, epoch = known.metadata.regions, known.epoch
        return nixl_prepped_dlist_handle(
            self,
            next(self._ids),
            None if peer in ("NIXL_INIT_AGENT", "") else peer,
            epoch,
            descs.rows.copy(),
            locate(regions, descs.getType(), descs.rows),
        )

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Indices,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Indices,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer between chosen descriptors of two prepared sides.

        Neighbours that are contiguous on both sides are merged. `skip_desc_merge` has no effect
        (upstream deprecates it).

        Raises:
            nixlInvalidParamError: sides swapped, indices empty, of unequal count or out of range,
                a pair of unequal lengths.
            KeyError: `operation` is neither "READ" nor "WRITE".
        """
        self._check_backends(backends)
        kind = OPERATIONS[operation]
        local_xfer_side._check(self)
        remote_xfer_side._check(self)
        if local_xfer_side._peer is not None or remote_xfer_side._peer is None:
            raise nixlInvalidParamError("the local side comes first, then a remote one")
        mine = local_xfer_side._select(local_indices)
        theirs = remote_xfer_side._select(remote_indices)
        if len(mine) != len(theirs):
            raise nixlInvalidParamError(f"{len(mine)} local and {len(theirs)} remote indices")
        local, remote = local_xfer_side._rows[mine], remote_xfer_side._rows[theirs]
        if not np.array_equal(local[:, 1], remote[:, 1]):
            raise nixlInvalidParamError("a pair of descriptors has unequal lengths")
        local_ids, remote_ids = local_xfer_side._regions[mine], remote_xfer_side._regions[theirs]
        name, generation = remote_xfer_side._peer, self._state.generation
        if name != self.name:
            known = self._peer(name)
            if known.epoch != remote_xfer_side._epoch:
                raise nixlNotFoundError(f"{name!r} was removed and added again: prepare anew")
            generation = known.metadata.generation
        template = Transfer(
            operation=kind,
            peer=name,
            generation=generation,
            runs=merge(local, remote, local_ids, remote_ids),
            descriptors=len(mine),
            local_regions=np.unique(local_ids).tolist(),
            remote_regions=np.unique(remote_ids).tolist(),
            notification=notif_msg or None,
            handle=next(self._ids),
        )
        self._prepared[template.handle] = _Prepared(template, remote_xfer_side._epoch)
        self._state.count(handles_open=1)
        return nixl_xfer_handle(self, template.handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Post. A given `notif_msg` replaces the handle's, for later posts too.

        Returns:
            "PROC", or "DONE" if it ended at once.

        Raises:
            nixlRepostActiveError: the last post has not ended.
            nixlNotFoundError: the peer was removed, or removed and added again, or local memory
                was deregistered.
            nixlRemoteDisconnectError: the peer died.
        """
        handle._check(self)
        prepared = self._prepared[int(handle)]
        if prepared.post is not None and not prepared.post.ended:
            raise nixlRepostActiveError(f"{handle!r} is active")
        template = prepared.template
        if notif_msg:
            template.notification = notif_msg
        if template.peer != self.name and self._peer(template.peer).epoch != prepared.epoch:
            raise nixlNotFoundError(f"{template.peer!r} was removed and added again")
        self._state.regions.hold(template.local_regions)
        post = prepared.post = replace(template)
        self._state.count(transfers_active=1)
        if template.peer == self.name:
            self._loop_back(post)
        else:
            self._backend.post(post)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """
        Returns:
            "PROC" while active, "DONE" for ever after.

        Raises:
            nixlNotPostedError: not posted yet.
            nixlCancelledError: aborted; nothing of it can land any more.
            nixlRemoteDisconnectError: the peer died; nothing of it can land any more.
            nixlNotFoundError: the peer refused: stale generation, or memory not registered there.
            nixlNotAllowedError: the peer refused the secret.
        """
        handle._check(self)
        post = self._prepared[int(handle)].post
        if post is None:
            raise nixlNotPostedError(f"{handle!r} has not been posted")
        if not post.ended:
            return "PROC"
        if post.error is not None:
            raise type(post.error)(*post.error.args)
        return "DONE"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Release; an active transfer is aborted in the background, so its memory is in use for a
        while still: `abort` first and wait where that matters."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # Notifications.

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes, backend: str | None = None
    ) -> None:
        """Send bytes to a peer, or to this agent itself. Not ordered with transfers.

        Raises:
            nixlNotFoundError: unknown agent.
            nixlRemoteDisconnectError: it died.
        """
        self._check_backends([] if backend is None else [backend])
        name = _name(remote_agent_name)
        if name == self.name:
            self._state.notified(name, bytes(notif_msg))
        else:
            self._peer(name)
            self._backend.notify(name, bytes(notif_msg))
        self._state.count(notifications_sent=1)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What arrived since the last call, by sender. All data of a WRITE is visible by then."""
        self._check_backends(backends)
        return self._state.take_notifications()

    # Extensions to NIXL.

    def abort(self, handle: nixl_xfer_handle) -> None:
        """Extension: stop an active transfer. Returns at once.

        The handle ends when the target has acknowledged that nothing of it can land any more, or
        is known dead: from then on `check_xfer_state` raises `nixlCancelledError`. One that had
        completed when the abort reached the target ends "DONE": its notification was delivered.
        One that has ended is left alone.
        """
        handle._check(self)
        post = self._prepared[int(handle)].post
        if post is None:
            raise nixlNotPostedError(f"{handle!r} has not been posted")
        if not post.ended:
            self._backend.abort(post)

    def set_event_callback(self, callback: Callable[[Event], None] | None) -> None:
        """Extension: be told that a notification arrived, a transfer ended or a peer died.

        Called from the agent's thread after the fact can be seen by the other methods. It must be
        quick: nothing moves meanwhile. Events from before are not told.
        """
        self._state.callback = callback

    def peer_state(self, agent: str | bytes) -> PeerState:
        """Extension: "alive" or "dead" (crashed, killed or closed). A stopped process is alive.

        Raises:
            nixlNotFoundError: no such agent was added here or has connected.
        """
        state = self._backend.peer_state(_name(agent))
        if state is None:
            raise nixlNotFoundError(f"unknown agent {_name(agent)!r}")
        return state

    def peer_is_quiet(self, agent: str | bytes) -> bool:
        """Extension: nothing from this peer can land in this agent's memory any more.

        True for a peer that is dead (it is called dead only then) or never connected.
        """
        return self._backend.peer_is_quiet(_name(agent))

    def statistics(self) -> Statistics:
        """Extension: a frozen snapshot of the counters."""
        return self._state.statistics()

    def close(self) -> None:
        """Extension: end the agent. Peers see it as dead. Twice is once."""
        self._finalizer()

    def __enter__(self) -> nixl_agent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Inside.

    def _peer(self, name: str) -> Peer:
        peer = self._state.peers.get(name)
        if peer is not None:
            return peer
        reason = self._backend.why_lost(name)
        if reason is not None:
            raise reason
        raise nixlNotFoundError(f"unknown agent {name!r}")

    def _check_backends(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.backends:
                raise nixlNotFoundError(f"no backend {name!r} here")

    def _loop_back(self, post: Transfer) -> None:
        runs, error = post.runs, None
        source, target = runs.local, runs.remote
        if post.operation == nixl_xfer_op_t.NIXL_READ:
            source, target = target, source
        try:
            self._state.regions.admit(post.remote_regions, runs.remote, runs.lengths)
        except nixlNotFoundError as refusal:
            error = refusal
        else:
            copy(source, target, runs.lengths)
            self._state.regions.release(post.remote_regions)
            self._state.served(post.operation, runs, post.descriptors)
            if post.notification is not None:
                self._state.notified(self.name, post.notification)
        self._state.finished(post, error)

    def _release(self, handle: nixl_xfer_handle) -> None:
        prepared = self._prepared.pop(int(handle), None)
        if prepared is None:
            return
        self._state.count(handles_open=-1)
        if prepared.post is not None and not prepared.post.ended:
            self._backend.abort(prepared.post)


def _name(agent: str | bytes) -> str:
    return agent.decode() if isinstance(agent, bytes) else agent
