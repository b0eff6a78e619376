"""Registered memory: what may be read and written, and what of it a transfer is using."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.descriptors import Rows
from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import nixlNotAllowedError, nixlNotFoundError

RegionIds = npt.NDArray[np.int64]
Vector = npt.NDArray[np.uint64]
# On the wire nothing is larger than a uint64; nothing here is below 0.
_Number = Annotated[int, msgspec.Meta(ge=0)]


class Place(NamedTuple):
    """Where a side of a transfer lies. The host's memory is one place, whatever its device id."""

    kind: nixl_mem_t
    device: int


HOST: Final = Place(nixl_mem_t.DRAM_SEG, 0)


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One registration. Its id is never used again, so a stale reference cannot hit a later one."""

    id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    kind: int
    address: _Number
    length: _Number
    device: _Number

    @property
    def place(self) -> Place:
        if self.kind == HOST.kind:
            return HOST
        return Place(nixl_mem_t(self.kind), self.device)


def locate(regions: Sequence[Region], kind: nixl_mem_t, rows: Rows) -> RegionIds:
    """The id of the one region that wholly contains each row.

    Args:
        rows: (N, 3) uint64 of address, bytes, device.

    Returns:
        (N,) int64.

    Raises:
        nixlNotFoundError: a row lies in no single region of its kind and device.
    """
    found = np.full(len(rows), -1, np.int64)
    for device in {region.device for region in regions if region.kind == kind}:
        mine = [r for r in regions if r.kind == kind and r.device == device]
        chosen = np.flatnonzero(rows[:, 2] == device)
        found[chosen] = _find(mine, rows[chosen, 0], rows[chosen, 1])
    _require_all(found, rows[:, 0], rows[:, 1])
    return found


def _require_all(found: RegionIds, addresses: Vector, lengths: Vector) -> None:
    missing = np.flatnonzero(found < 0)
    if len(missing):
        first = missing[0]
        raise nixlNotFoundError(
            f"{len(missing)} of {len(found)} descriptors lie in no registered region; "
            f"the first is {int(lengths[first])} bytes at {int(addresses[first]):#x}"
        )


def _find(regions: Sequence[Region], addresses: Vector, lengths: Vector) -> RegionIds:
    """(N,) int64: the id of a region that contains each piece, -1 where there is none."""
    found = np.full(len(addresses), -1, np.int64)
    if not regions:
        return found
    if len(addresses) == 1:
        region = _containing(regions, addresses, lengths)
        if region is not None:
            found[0] = region.id
        return found
    regions = sorted(regions, key=lambda region: region.address)
    starts = np.array([r.address for r in regions], np.uint64)
    sizes = np.array([r.length for r in regions], np.uint64)
    ids = np.array([r.id for r in regions], np.int64)
    overlap = bool((starts[1:] - starts[:-1] < sizes[:-1]).any())
    left = np.arange(len(addresses))
    nearest = np.searchsorted(starts, addresses, side="right") - 1
    # The nearest start below decides, but where regions overlap an earlier one may be longer.
    for step in range(len(regions) if overlap else 1):
        index = np.maximum(nearest - step, 0)
        # Written so that no sum can wrap: offset <= size and length <= size - offset.
        offsets = addresses[left] - starts[index]
        inside = (nearest >= step) & (offsets <= sizes[index])
        inside &= lengths[left] <= np.where(inside, sizes[index] - offsets, 0)
        found[left[inside]] = ids[index[inside]]
        left, nearest = left[~inside], nearest[~inside]
        if not len(left):
            break
    return found


def _containing(regions: Sequence[Region], addresses: Vector, lengths: Vector) -> Region | None:
    """The region of one piece alone, without numpy: its latency counts."""
    first, length = int(addresses[0]), int(lengths[0])
    for region in regions:
        if region.address <= first and first + length <= region.address + region.length:
            return region
    return None


def _common_place(regions: Sequence[Region]) -> Place:
    """
    Raises:
        nixlNotFoundError: there is none.
    """
    places = {region.place for region in regions} or {HOST}
    if len(places) > 1:
        raise nixlNotFoundError("a transfer's memory lies in one place")
    return places.pop()


class RegionTable:
    """The regions of one agent. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._uses: dict[int, int] = {}
        self._ids = itertools.count(1)

    def snapshot(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())

    def add(self, kind: nixl_mem_t, rows: Rows) -> None:
        with self._lock:
            for address, length, device in rows.tolist():
                region = Region(next(self._ids), int(kind), address, length, device)
                self._regions[region.id] = region

    def find(self, kind: nixl_mem_t, rows: Rows) -> list[int]:
        """The ids of the registrations that are exactly these rows.

        Raises:
            nixlNotFoundError: there is none for a row.
        """
        with self._lock:
            return self._exactly(kind, rows)

    def _exactly(self, kind: nixl_mem_t, rows: Rows) -> list[int]:
        by_place: dict[tuple[int, int, int], list[int]] = {}
        for region in self._regions.values():
            if region.kind == kind:
                place = (region.address, region.length, region.device)
                by_place.setdefault(place, []).append(region.id)
        found = []
        for address, length, device in rows.tolist():
            candidates = by_place.get((address, length, device))
            if not candidates:
                raise nixlNotFoundError(f"{length} bytes at {address:#x} are not registered")
            found.append(candidates.pop())
        return found

    def remove(self, kind: nixl_mem_t, rows: Rows) -> None:
        """All of the rows or none.

        Raises:
            nixlNotFoundError: a row is not exactly one that was registered.
            nixlNotAllowedError: a transfer is using one; upstream leaves this undefined.
        """
        with self._lock:
            leaving = self._exactly(kind, rows)
            busy = sum(self._uses.get(id, 0) for id in leaving)
            if busy:
                raise nixlNotAllowedError(f"{busy} transfers still use this memory")
            for id in leaving:
                del self._regions[id]
                self._uses.pop(id, None)

    def busy(self) -> int:
        """How many times a region is in use."""
        with self._lock:
            return sum(self._uses.values())

    def locate(self, kind: nixl_mem_t, rows: Rows) -> RegionIds:
        return locate(self.snapshot(), kind, rows)

    def hold(self, ids: Iterable[int]) -> None:
        """Keep these regions from being deregistered.

        Raises:
            nixlNotFoundError: one has been already.
        """
        with self._lock:
            self._hold(list(ids))

    def _hold(self, ids: list[int]) -> None:
        for id in ids:
            if id not in self._regions:
                raise nixlNotFoundError("the memory has been deregistered since")
        for id in ids:
            self._uses[id] = self._uses.get(id, 0) + 1

    def admit(self, ids: Iterable[int], addresses: Vector, lengths: Vector) -> Place:
        """Hold exactly these regions for a peer's transfer of (R,) uint64 pieces inside them.

        Returns:
            Where they lie.

        Raises:
            nixlNotFoundError: a region is gone, a piece lies outside of those named, or these are
                not all in one place.
        """
        ids = list(ids)
        with self._lock:
            self._hold(ids)
            # Each once: a peer may name one as often as it likes.
            named = [self._regions[id] for id in dict.fromkeys(ids)]
        try:
            if len(addresses) != 1 or _containing(named, addresses, lengths) is None:
                _require_all(_find(named, addresses, lengths), addresses, lengths)
            return _common_place(named)
        except nixlNotFoundError:
            self.release(ids)
            raise

    def release(self, ids: Iterable[int]) -> None:
        with self._lock:
            for id in ids:
                self._uses[id] -= 1
