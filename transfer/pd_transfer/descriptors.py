"""Descriptor lists: which pieces of memory a registration or a transfer is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import nixlNotFoundError

Rows = npt.NDArray[np.uint64]

_COLUMNS: Final = 3


def checked_rows(array: npt.NDArray[Any]) -> Rows:
    """A copy of an Nx3 C-contiguous (u)int64 array as uint64; ValueError for anything else."""
    if array.ndim != 2 or array.shape[1] != _COLUMNS:
        raise ValueError(f"descriptors must have shape (N, 3), not {array.shape}")
    if array.dtype not in (np.dtype(np.uint64), np.dtype(np.int64)):
        raise ValueError(f"descriptors must be uint64 or int64, not {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError("descriptors must be C-contiguous")
    if array.dtype == np.int64 and array.size and int(array.min()) < 0:
        raise ValueError("addresses, lengths and device ids are not negative")
    return array.astype(np.uint64)


class _DescriptorList:
    """Rows (addr, len, dev_id) as a growing (N, 3) uint64 array.

    No ``__len__``, as upstream: callers test lists for truth, and an empty one is true.
    """

    _arity = _COLUMNS

    def __init__(
        self,
        type: nixl_mem_t,
        descs: int | npt.NDArray[Any] | Sequence[tuple[Any, ...]] = 0,
    ) -> None:
        self._type = nixl_mem_t(type)
        self._count = 0
        self._rows: Rows = np.empty((0, _COLUMNS), np.uint64)
        if isinstance(descs, np.ndarray):
            self._rows = checked_rows(descs)
            self._count = len(self._rows)
        elif isinstance(descs, int | np.integer):
            if descs < 0:
                raise ValueError("init_size is not negative")
            self._rows = np.zeros((int(descs), _COLUMNS), np.uint64)
            self._count = int(descs)
        else:
            rows = [self._checked(row) for row in descs]
            self._rows = np.array([row[:_COLUMNS] for row in rows], np.uint64).reshape(-1, 3)
            self._count = len(rows)

    def _checked(self, row: object) -> tuple[Any, ...]:
        if not isinstance(row, tuple):
            raise TypeError(f"a descriptor is a tuple, not {row!r}")
        if len(row) != self._arity:
            raise ValueError(f"a descriptor here has {self._arity} fields, got {len(row)}")
        if any(int(field) < 0 for field in row[:_COLUMNS]):
            raise ValueError("addresses, lengths and device ids are not negative")
        return row

    def _position(self, index: int) -> int:
        """Bounds are checked, unlike upstream, where a bad index reads foreign memory."""
        if not 0 <= index < self._count:
            raise IndexError(f"descriptor {index} of {self._count}")
        return index

    @property
    def rows(self) -> Rows:
        """(N, 3) uint64 view: address, bytes, device. An extension; do not write to it."""
        return self._rows[: self._count]

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return self._count

    def isEmpty(self) -> bool:
        return self._count == 0

    def print(self) -> None:
        """Write the rows to stdout."""
        print(f"{type(self).__name__} {self._type.name}: {self._count}")
        for index in range(self._count):
            print(*self[index])

    def __getstate__(self) -> dict[str, Any]:
        return {"type": int(self._type), "rows": self.rows.tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._type = nixl_mem_t(state["type"])
        self._rows = np.frombuffer(state["rows"], np.uint64).reshape(-1, _COLUMNS).copy()
        self._count = len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _DescriptorList) or type(self) is not type(other):
            return NotImplemented
        return self._type == other._type and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        address, length, device = self._rows[self._position(index)].tolist()
        return (address, length, device)

    def __setitem__(self, index: int, row: tuple[Any, ...]) -> None:
        self._rows[self._position(index)] = self._checked(row)[:_COLUMNS]

    def addDesc(self, row: tuple[Any, ...]) -> None:
        row = self._checked(row)
        if self._count == len(self._rows):
            grown = np.empty((max(8, 2 * self._count), _COLUMNS), np.uint64)
            grown[: self._count] = self.rows
            self._rows = grown
        self._rows[self._count] = row[:_COLUMNS]
        self._count += 1

    def append(self, row: tuple[Any, ...]) -> None:
        self.addDesc(row)

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self.rows, self._position(index), axis=0)
        self._count -= 1

    def clear(self) -> None:
        self._count = 0

    def index(self, row: tuple[Any, ...]) -> int:
        """Position of the first row with this address, length and device.

        Raises:
            nixlNotFoundError: no such row.
        """
        wanted = np.array(self._checked(row)[:_COLUMNS], np.uint64)
        hits = np.flatnonzero((self.rows == wanted).all(axis=1))
        if not len(hits):
            raise nixlNotFoundError(f"no descriptor {row!r}")
        return int(hits[0])


class nixlXferDList(_DescriptorList):
    """Memory to transfer: rows ``(addr, len, dev_id)``."""


class nixlRegDList(_DescriptorList):
    """Memory to register: rows ``(addr, len, dev_id, meta)``; `meta` reads back as bytes."""

    _arity = 4

    def __init__(
        self,
        type: nixl_mem_t,
        descs: int | npt.NDArray[Any] | Sequence[tuple[Any, ...]] = 0,
    ) -> None:
        super().__init__(type, descs)
        if isinstance(descs, int | np.integer | np.ndarray):
            self._metas = [b""] * self._count
        else:
            self._metas = [_as_bytes(row[3]) for row in descs]

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        if equal is True:
            assert isinstance(other, nixlRegDList)
            return self._metas == other._metas
        return equal

    __hash__ = None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self._metas[index])

    def __setitem__(self, index: int, row: tuple[Any, ...]) -> None:
        super().__setitem__(index, row)
        self._metas[index] = _as_bytes(row[3])

    def addDesc(self, row: tuple[Any, ...]) -> None:
        super().addDesc(row)
        self._metas.append(_as_bytes(row[3]))

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._metas[index]

    def clear(self) -> None:
        super().clear()
        self._metas.clear()

    def trim(self) -> nixlXferDList:
        return nixlXferDList(self._type, self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "metas": self._metas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._metas = list(state["metas"])


class nixlRemoteDList(_DescriptorList):
    """Rows ``(addr, len, dev_id, agent_name)``. Only NIXL's GPU device API takes them."""

    _arity = 4

    def __init__(self, type: nixl_mem_t, descs: int | Sequence[tuple[Any, ...]] = 0) -> None:
        super().__init__(type, descs)
        if isinstance(descs, int | np.integer):
            self._agents = [""] * self._count
        else:
            self._agents = [_as_str(row[3]) for row in descs]

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        if equal is True:
            assert isinstance(other, nixlRemoteDList)
            return self._agents == other._agents
        return equal

    __hash__ = None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self._agents[index])

    def __setitem__(self, index: int, row: tuple[Any, ...]) -> None:
        super().__setitem__(index, row)
        self._agents[index] = _as_str(row[3])

    def addDesc(self, row: tuple[Any, ...]) -> None:
        super().addDesc(row)
        self._agents.append(_as_str(row[3]))

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._agents[index]

    def clear(self) -> None:
        super().clear()
        self._agents.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a remote list is not pickled, as upstream")


def _as_str(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _as_bytes(meta: str | bytes) -> bytes:
    return meta.encode() if isinstance(meta, str) else bytes(meta)
