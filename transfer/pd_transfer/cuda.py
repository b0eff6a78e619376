"""A GPU's memory, by CUDA's driver: whether an address is in it, and copies there.

The driver's own library, which every machine with a GPU has, is all that is needed; no CUDA toolkit
and no Python package. How data crosses between processes is UCX's matter.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from pd_transfer.descriptors import Rows
from pd_transfer.errors import nixlBackendError, nixlInvalidParamError, nixlNotFoundError
from pd_transfer.runs import COPIED, Vector

_NON_BLOCKING: Final = 1
_MEMORY_TYPE: Final = 2
_DEVICE_ORDINAL: Final = 9
_IN_DEVICE: Final = 2
# How much memory is taken at once for packed messages: for one window each way of one peer.
_SLOTS: Final = 16

_int, _pointer, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_address = ctypes.c_ulonglong
_FUNCTIONS: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [_int, _pointer],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGet": [_pointer, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuCtxSetCurrent": [_pointer],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuCtxSynchronize": [],
    "cuStreamCreate": [_pointer, ctypes.c_uint],
    "cuStreamSynchronize": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemcpyAsync": [_address, _address, _size, _pointer],
    "cuPointerGetAttribute": [_pointer, _int, _address],
}


@functools.cache
def _driver() -> ctypes.CDLL:
    """
    Raises:
        nixlNotFoundError: no driver, or no GPU that it could use.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            getattr(library, name).argtypes = types
    except (OSError, AttributeError) as error:
        raise nixlNotFoundError(f"there is no CUDA driver here: {error}") from error
    try:
        _check(library, library.cuInit(0))
    except nixlBackendError as error:
        raise nixlNotFoundError(f"there is no GPU here: {error}") from error
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        said = (text.value or b"unknown").decode(errors="replace")
        raise nixlBackendError(f"CUDA error {status}: {said}")


def device_count() -> int:
    """How many GPUs this process may use; 0 where there is no driver."""
    count = ctypes.c_int()
    try:
        library = _driver()
        _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
    except (nixlNotFoundError, nixlBackendError):
        return 0
    return count.value


@functools.cache
def device_memory(device: int) -> DeviceMemory:
    """The memory of a GPU, by the number that this process knows it by.

    Raises:
        nixlNotFoundError: no such GPU, or no driver.
    """
    library = _driver()
    if not 0 <= device < device_count():
        raise nixlNotFoundError(f"there is no GPU {device}: {device_count()} are visible here")
    return DeviceMemory(library, device)


class _Slot:
    """Memory for a packed message, of `DeviceMemory`'s; given back when nobody refers to it."""

    def __init__(self, free: list[int], nbytes: int) -> None:
        self._free = free
        self.address = free.pop()
        self.__cuda_array_interface__ = _interface(self.address, nbytes)

    def __del__(self) -> None:
        self._free.append(self.address)


class _View:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = _interface(address, nbytes)


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class DeviceMemory:
    """Safe to use from any thread; each method leaves the thread's CUDA context as it was, but
    for `use`. Copies go beside what else the GPU computes, and are over when they return."""

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self.device = device
        self._library = library
        self._lock = threading.Lock()
        self._free: list[int] = []
        handle = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._do("cuDeviceGet", ctypes.byref(handle), device)
        # The one that torch and everybody else uses. Never released: it lives as long as we do.
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        with self.current():
            self._do("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def _do(self, name: str, *args: Any) -> None:
        _check(self._library, getattr(self._library, name)(*args))

    def use(self) -> None:
        """Make this device's context the calling thread's, as UCX's progress needs it."""
        self._do("cuCtxSetCurrent", self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        self._do("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def require(self, rows: Rows) -> None:
        """
        Raises:
            nixlInvalidParamError: a row, (address, bytes, device), is not in this GPU's memory.
        """
        with self.current():
            for address, length, _ in rows.tolist():
                for end in {address, address + max(length, 1) - 1}:
                    if not self._holds(end):
                        raise nixlInvalidParamError(
                            f"{length} bytes at {address:#x} are not memory of GPU {self.device}"
                        )

    def _holds(self, address: int) -> bool:
        kind, ordinal = ctypes.c_uint(), ctypes.c_int(-1)
        ask = self._library.cuPointerGetAttribute
        # An address that CUDA has never heard of is an error.
        if ask(ctypes.byref(kind), _MEMORY_TYPE, address) or kind.value != _IN_DEVICE:
            return False
        return not ask(ctypes.byref(ordinal), _DEVICE_ORDINAL, address) and (
            ordinal.value == self.device
        )

    # What a wire needs (`runs.Memory`).

    def view(self, address: int, nbytes: int) -> Any:
        return _View(address, nbytes)

    def staging(self, nbytes: int) -> Any:
        assert nbytes <= COPIED.message
        with self._lock:
            if not self._free:
                self._grow()
            return _Slot(self._free, nbytes)

    def gather(self, addresses: Vector, lengths: Vector) -> Any:
        slot = self.staging(int(lengths.sum()))
        self.copy(addresses, _offsets(slot.address, lengths), lengths)
        return slot

    def scatter(self, packed: Any, addresses: Vector, lengths: Vector) -> None:
        self.copy(_offsets(packed.address, lengths), addresses, lengths)

    def settle(self) -> None:
        with self.current():
            self._do("cuCtxSynchronize")

    def copy(self, sources: Vector, targets: Vector, lengths: Vector) -> None:
        """Copy (R,) pieces, each wholly in a GPU's or the host's memory."""
        copy = self._library.cuMemcpyAsync
        pieces = zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)
        with self.current():
            try:
                for target, source, length in pieces:
                    _check(self._library, copy(target, source, length, self._stream))
            finally:
                self._do("cuStreamSynchronize", self._stream)

    def _grow(self) -> None:
        slab = ctypes.c_ulonglong()
        with self.current():
            self._do("cuMemAlloc_v2", ctypes.byref(slab), _SLOTS * COPIED.message)
        self._free += [slab.value + at * COPIED.message for at in range(_SLOTS)]


def _offsets(first: int, lengths: Vector) -> Vector:
    return np.asarray(np.cumsum(lengths) - lengths + np.uint64(first), np.uint64)
