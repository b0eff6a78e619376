"""Merging, planning and copying of scattered memory, without per-descriptor Python work.

A *run* is a piece that is contiguous on both sides. Runs travel as *messages*: a long run in one or
more messages of its own, neighbouring short runs packed together into one. Both sides derive the
same plan from the runs' lengths, so only those cross the wire.

    runs      |aa|b|c|ddddddddddd|e|f|
    messages   ----- ------ ----- ---
               packed  own   own  packed
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

OWN_MESSAGE: Final = 4 * 1024 * 1024


class Packing(NamedTuple):
    """Runs of up to `run` bytes share messages of up to `message`, none above OWN_MESSAGE."""

    run: int
    message: int


# Part of the wire protocol: both sides must agree. Where packing copies, longer runs are better off
# with a message each (bench.py), and a packed one fits a core's second-level cache.
COPIED: Final = Packing(128 * 1024, 512 * 1024)
IN_PLACE: Final = Packing(OWN_MESSAGE, OWN_MESSAGE)


class Runs(NamedTuple):
    """(R,) uint64 each: where a run lies on either side, and its bytes (never 0)."""

    local: Vector
    remote: Vector
    lengths: Vector

    @property
    def nbytes(self) -> int:
        return int(self.lengths[0]) if len(self.lengths) == 1 else int(self.lengths.sum())


class Message(NamedTuple):
    """Runs [first, last) packed, or `nbytes` at `offset` of the one run `first`."""

    first: int
    last: int
    offset: int
    nbytes: int


def merge(
    local: npt.NDArray[np.uint64],
    remote: npt.NDArray[np.uint64],
    local_regions: npt.NDArray[np.int64],
    remote_regions: npt.NDArray[np.int64],
) -> Runs:
    """Merge neighbours that are contiguous on both sides and stay within one region of each.

    Args:
        local: (N, 3) rows of equal lengths as `remote`, (N, 3).
        local_regions: (N,) region ids; `remote_regions` likewise.
    """
    lengths = local[:, 1]
    if len(lengths) == 1 and lengths[0]:  # a page alone: its latency counts
        return Runs(local[:, 0].copy(), remote[:, 0].copy(), lengths.copy())
    keep = lengths > 0
    if not keep.all():
        local, remote, lengths = local[keep], remote[keep], lengths[keep]
        local_regions, remote_regions = local_regions[keep], remote_regions[keep]
    if not len(lengths):
        empty = np.empty(0, np.uint64)
        return Runs(empty, empty, empty)
    ends_local, ends_remote = local[:, 0] + lengths, remote[:, 0] + lengths
    joined = (
        (ends_local[:-1] == local[1:, 0])
        & (ends_remote[:-1] == remote[1:, 0])
        & (local_regions[:-1] == local_regions[1:])
        & (remote_regions[:-1] == remote_regions[1:])
    )
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Runs(
        np.ascontiguousarray(local[first, 0]),
        np.ascontiguousarray(remote[first, 0]),
        np.add.reduceat(lengths, first),
    )


def plan(lengths: Vector, packing: Packing) -> list[Message]:
    """The messages that carry runs of these lengths, in order. (R,) uint64, none 0."""
    messages: list[Message] = []
    if not len(lengths):
        return messages
    if len(lengths) == 1 and lengths[0] <= packing.run:  # a page alone: its latency counts
        return [Message(0, 1, 0, int(lengths[0]))]
    short = lengths <= packing.run
    edges = np.flatnonzero(np.concatenate(([True], short[1:] != short[:-1], [True])))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if short[start]:
            messages += _packed(lengths, start, stop, packing.message)
        else:
            for run in range(start, stop):
                length = int(lengths[run])
                messages += [
                    Message(run, run + 1, offset, min(OWN_MESSAGE, length - offset))
                    for offset in range(0, length, OWN_MESSAGE)
                ]
    return messages


def _packed(lengths: Vector, start: int, stop: int, most: int) -> list[Message]:
    ends = np.cumsum(lengths[start:stop])
    messages: list[Message] = []
    first, sent = 0, 0
    while first < stop - start:
        last = int(np.searchsorted(ends, sent + most, side="right"))
        last = max(last, first + 1)
        nbytes = int(ends[last - 1]) - sent
        messages.append(Message(start + first, start + last, 0, nbytes))
        first, sent = last, int(ends[last - 1])
    return messages


class _Raw:
    """Memory by address, for `np.asarray`; ctypes would cache one type per size for ever."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None):
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def view(address: int, nbytes: int) -> Bytes:
    """The memory itself as (nbytes,) uint8. The caller answers for it being there."""
    return np.asarray(_Raw(address, (nbytes,), None))


def direct(addresses: Vector, lengths: Vector, message: Message) -> tuple[int, int] | None:
    """Address and bytes of a message on this side if it is contiguous here, else None."""
    first, last = message.first, message.last
    if last - first > 1:
        ends = addresses[first : last - 1] + lengths[first : last - 1]
        if not np.array_equal(ends, addresses[first + 1 : last]):
            return None
    return int(addresses[first]) + message.offset, message.nbytes


def gather(addresses: Vector, lengths: Vector) -> Bytes:
    """Copy (R,) pieces into one new array, in order."""
    if len(lengths) and (lengths == lengths[0]).all():
        windows, starts = _windows(addresses, int(lengths[0]))
        return np.ascontiguousarray(windows[starts]).reshape(-1)
    packed = np.empty(int(lengths.sum()), np.uint8)
    places = _places(packed, lengths)
    for length in np.unique(lengths):
        chosen = lengths == length
        source, starts = _windows(addresses[chosen], int(length))
        target, ends = _windows(places[chosen], int(length))
        target[ends] = source[starts]
    return packed


def scatter(packed: Bytes, addresses: Vector, lengths: Vector) -> None:
    """Copy one array into (R,) pieces, in order."""
    if len(lengths) and (lengths == lengths[0]).all():
        windows, starts = _windows(addresses, int(lengths[0]))
        windows[starts] = packed.reshape(len(lengths), -1)
        return
    places = _places(packed, lengths)
    for length in np.unique(lengths):
        chosen = lengths == length
        source, starts = _windows(places[chosen], int(length))
        target, ends = _windows(addresses[chosen], int(length))
        target[ends] = source[starts]


def _places(packed: Bytes, lengths: Vector) -> Vector:
    ends = np.cumsum(lengths)
    return np.asarray(ends - lengths + np.uint64(packed.ctypes.data), np.uint64)


def _windows(addresses: Vector, length: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """All windows of `length` bytes from the lowest address up, and which of them are the pieces.

    Indexing overlapping windows lets numpy copy pieces at any byte offset at memcpy's speed.
    Only the indexed ones are touched, so what lies between need not be mapped.
    """
    lowest = int(addresses.min())
    starts = (addresses - np.uint64(lowest)).astype(np.int64)
    raw = _Raw(lowest, (int(starts.max()) + 1, length), (1, 1))
    return np.asarray(raw), starts


def copy(source: Vector, target: Vector, lengths: Vector) -> None:
    """Copy (R,) pieces within this process."""
    if len(lengths):
        scatter(gather(source, lengths), target, lengths)


class Memory(Protocol):
    """What a wire does with the memory of its side: the host's, or a GPU's (cuda.py).

    What it hands out as memory has the buffer protocol or the CUDA array interface.
    """

    def view(self, address: int, nbytes: int) -> Any:
        """The memory itself."""

    def staging(self, nbytes: int) -> Any:
        """New memory for a packed message to be received into."""

    def gather(self, addresses: Vector, lengths: Vector) -> Any:
        """(R,) pieces packed into new memory."""

    def scatter(self, packed: Any, addresses: Vector, lengths: Vector) -> None:
        """What `staging` or `gather` returned, copied into (R,) pieces."""

    def settle(self) -> None:
        """Return when no copy that anybody has begun can land here any more."""


class HostMemory:
    """`Memory` of this process."""

    view = staticmethod(view)
    gather = staticmethod(gather)
    scatter = staticmethod(scatter)

    def staging(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def settle(self) -> None:
        """Nothing copies but its own threads."""


HOST_MEMORY: Final[Memory] = HostMemory()
