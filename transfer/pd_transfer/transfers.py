"""The part of `nixl_agent` that is about transfers: preparing, posting, asking, aborting."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pd_transfer.base import AgentBase, as_name
from pd_transfer.collect import strided, xfer_descs
from pd_transfer.descriptors import nixlXferDList
from pd_transfer.enums import (
    OPERATIONS,
    nixl_xfer_op_t,
)
from pd_transfer.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRepostActiveError,
)
from pd_transfer.handles import nixl_prepped_dlist_handle, nixl_xfer_handle
from pd_transfer.regions import RegionIds, locate
from pd_transfer.runs import merge
from pd_transfer.state import Transfer
from pd_transfer.telemetry import CostMethod, nixlXferTelemetry

logger: Final = logging.getLogger(__name__)


Indices = list[int] | npt.NDArray[np.int64]


@dataclass(eq=False)
class Prepared:
    """What a transfer handle stands for: the transfer to post, and its latest post."""

    template: Transfer
    epoch: int
    post: Transfer | None = None


class TransferCalls(AgentBase):
    _ids: itertools.count[int]
    _prepared: dict[int, Prepared]
    _telemetry: bool

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Resolve one side of coming transfers, e.g. a whole page pool, once.

        `xfer_list` may also be an (N, 5) array of (address, bytes, device, stride, count), each
        standing for `count` pieces that lie `stride` bytes apart; then `mem_type` is needed.

        Args:
            agent_name: "NIXL_INIT_AGENT" or "" for this agent's local side, its own name for the
                remote side of a loopback, else a peer.

        Raises:
            nixlNotFoundError: unknown agent, or a descriptor in no single registered region.
        """
        self._check_backends(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.shape[1:] == (5,):
            xfer_list = strided(xfer_list)
        descs = xfer_descs(xfer_list, mem_type)
        peer, epoch = as_name(agent_name), 0
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
            descs.getType(),
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
                a pair of unequal lengths, memory of several devices on one side.
            KeyError: `operation` is neither "READ" nor "WRITE".
        """
        self._check_backends(backends)
        kind = OPERATIONS[operation]
        local_xfer_side._check(self)
        remote_xfer_side._check(self)
        if local_xfer_side._peer is not None or remote_xfer_side._peer is None:
            raise nixlInvalidParamError("the local side comes first, then a remote one")
        local, local_ids = local_xfer_side._select(local_indices)
        remote, remote_ids = remote_xfer_side._select(remote_indices)
        if len(local) != len(remote):
            raise nixlInvalidParamError(f"{len(local)} local and {len(remote)} remote indices")
        if not (local[:, 1] == remote[:, 1]).all():
            raise nixlInvalidParamError("a pair of descriptors has unequal lengths")
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
            descriptors=len(local),
            local_regions=_distinct(local_ids),
            remote_regions=_distinct(remote_ids),
            notification=notif_msg or None,
            handle=next(self._ids),
            local_place=local_xfer_side._place(local),
            remote_place=remote_xfer_side._place(remote),
        )
        self._prepared[template.handle] = Prepared(template, remote_xfer_side._epoch)
        self._state.count(handles_open=1)
        return nixl_xfer_handle(self, template.handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """A transfer between two lists, descriptor by descriptor. Neighbours are merged.

        Raises:
            nixlInvalidParamError: empty, of unequal count, or a pair of unequal lengths.
            nixlNotFoundError: unknown agent, or memory that is not registered.
            KeyError: `operation` is neither "READ" nor "WRITE".
        """
        local = self.prep_xfer_dlist("NIXL_INIT_AGENT", local_descs)
        remote = self.prep_xfer_dlist(remote_agent or self.name, remote_descs)
        return self.make_prepped_xfer(
            operation,
            local,
            np.arange(local_descs.descCount()),
            remote,
            np.arange(remote_descs.descCount()),
            notif_msg,
            backends,
        )

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
        post = prepared.post = template.posted(time.monotonic())
        self._state.count(transfers_active=1)
        if template.peer == self.name:
            self._loop_back(post)
        else:
            self._backend.post(post)
        post.returned_at = time.monotonic()
        return _state(post)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Asking in a loop is fine: it waits up to 1 ms for the end before it says "PROC".

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
            self._state.pause(post, self._backend.wait)
        return _state(post)

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Times of the latest post; `xferDuration` is 0 while it is active.

        Raises:
            nixlNoTelemetryError: `capture_telemetry` was not asked for.
            nixlNotPostedError: not posted yet.
        """
        handle._check(self)
        if not self._telemetry:
            raise nixlNoTelemetryError("the agent was not configured with capture_telemetry")
        post = self._prepared[int(handle)].post
        if post is None:
            raise nixlNotPostedError(f"{handle!r} has not been posted")
        return nixlXferTelemetry(
            startTime=round(post.posted_at * 1e6),
            postDuration=round((post.returned_at - post.posted_at) * 1e6),
            xferDuration=round((post.ended_at - post.posted_at) * 1e6) if post.ended else 0,
            totalBytes=post.runs.nbytes,
            descCount=len(post.runs.lengths),
        )

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, CostMethod]:
        """(microseconds, error margin, "ANALYTICAL_BACKEND"), from earlier transfers of the peer.

        (0, 0, "UNKNOWN") before the first, as upstream's UCX always says.
        """
        req_handle._check(self)
        template = self._prepared[int(req_handle)].template
        with self._state.lock:
            cost = self._state.costs.get(template.peer)
            return (0, 0, "UNKNOWN") if cost is None else cost.estimate(template.runs.nbytes)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The name of the backend that carries it."""
        handle._check(self)
        return self._backend.kind

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Release; an active transfer is aborted in the background, so its memory is in use for a
        while still: `abort` first and wait where that matters."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

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

    # Inside.

    def _loop_back(self, post: Transfer) -> None:
        runs = post.runs
        error: Exception | None = None
        source, target = runs.local, runs.remote
        if post.operation == nixl_xfer_op_t.NIXL_READ:
            source, target = target, source
        try:
            self._state.regions.admit(post.remote_regions, runs.remote, runs.lengths)
        except nixlNotFoundError as refusal:
            error = refusal
        else:
            try:
                self._backend.copy(post, source, target)
            except nixlBackendError as failure:
                error = failure
            self._state.regions.release(post.remote_regions)
        if error is None:
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


def _distinct(ids: RegionIds) -> list[int]:
    """Sorted; most transfers stay within one region."""
    first = int(ids[0])
    return [first] if len(ids) == 1 or (ids == first).all() else np.unique(ids).tolist()


def _state(post: Transfer) -> str:
    if not post.ended:
        return "PROC"
    if post.error is not None:
        raise type(post.error)(*post.error.args)
    return "DONE"
