"""The two handle classes, as NIXL hands them out."""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pd_transfer.descriptors import Rows
from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import nixlInvalidParamError
from pd_transfer.regions import HOST, Place, RegionIds


class Owner(Protocol):
    """What a handle needs of the agent that made it."""

    def _release(self, handle: nixl_xfer_handle) -> None: ...


class _Handle:
    __slots__ = ("__weakref__", "_agent", "_handle", "_released")

    def __init__(self, agent: Owner, handle: int) -> None:
        self._agent = weakref.ref(agent)
        self._handle = handle
        self._released = False

    def __int__(self) -> int:
        return self._handle

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle:#x}, released={self._released})"

    def _check(self, agent: Owner) -> None:
        """Upstream, using a released handle is a dangling pointer; here it raises."""
        if self._released:
            raise nixlInvalidParamError(f"{self!r} has been released")
        if self._agent() is not agent:
            raise nixlInvalidParamError(f"{self!r} belongs to another agent")


class nixl_prepped_dlist_handle(_Handle):
    """One side of coming transfers, resolved once: descriptors and the regions they lie in."""

    __slots__ = ("_epoch", "_kind", "_peer", "_regions", "_rows")

    def __init__(
        self,
        agent: Owner,
        handle: int,
        peer: str | None,
        epoch: int,
        kind: nixl_mem_t,
        rows: Rows,
        regions: RegionIds,
    ) -> None:
        super().__init__(agent, handle)
        self._peer = peer
        self._epoch = epoch
        self._kind = kind
        self._rows = rows
        self._regions = regions

    def release(self) -> None:
        self._released = True

    def _place(self, rows: Rows) -> Place:
        """Where these rows of it lie."""
        if self._kind == HOST.kind:
            return HOST
        devices = rows[:, 2]
        if (devices != devices[0]).any():
            raise nixlInvalidParamError("one transfer's memory is on one device a side")
        return Place(self._kind, int(devices[0]))

    def _select(self, indices: list[int] | npt.NDArray[np.int64]) -> tuple[Rows, RegionIds]:
        """The chosen rows and their regions; not to be written to."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or not len(chosen):
            raise nixlInvalidParamError("indices are a non-empty list or 1-D array")
        if chosen.dtype.kind not in "iu":
            raise nixlInvalidParamError(f"indices are integers, not {chosen.dtype}")
        if len(chosen) == 1:  # a page alone: its latency counts
            lowest = highest = int(chosen[0])
        else:
            lowest, highest = int(chosen.min()), int(chosen.max())
        if lowest < 0 or highest >= len(self._rows):
            raise nixlInvalidParamError(f"an index is out of range: {len(self._rows)} descriptors")
        if len(chosen) == 1:
            return self._rows[lowest : lowest + 1], self._regions[lowest : lowest + 1]
        return self._rows[chosen], self._regions[chosen]


class nixl_xfer_handle(_Handle):
    """A transfer that can be posted, and posted again once it has ended."""

    __slots__ = ()

    def release(self) -> None:
        """Release; an active transfer is aborted. Twice is once."""
        agent = self._agent()
        if not self._released and agent is not None:
            agent._release(self)
        self._released = True

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.release()
