"""Descriptor lists out of what NIXL's callers hand in: tuples, arrays, tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pd_transfer.descriptors import Rows, nixlRegDList, nixlRemoteDList, nixlXferDList
from pd_transfer.enums import MEMORY_TYPES, nixl_mem_t
from pd_transfer.errors import nixlInvalidParamError


def strided(array: npt.NDArray[Any]) -> Rows:
    """(N, 3) rows of NIXL's compressed form: (N, 5) of address, bytes, device, stride, count.

    Raises:
        ValueError: another shape or dtype, or a negative number.
    """
    if array.ndim != 2 or array.shape[1] != 5:
        raise ValueError(f"strided descriptors have shape (N, 5), not {array.shape}")
    if array.dtype not in (np.dtype(np.uint64), np.dtype(np.int64)):
        raise ValueError(f"descriptors must be uint64 or int64, not {array.dtype}")
    if array.dtype == np.int64 and array.size and int(array.min()) < 0:
        raise ValueError("descriptors hold no negative numbers")
    table = array.astype(np.uint64)
    counts = table[:, 4].astype(np.int64)
    block = np.repeat(np.arange(len(table)), counts)
    nth = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = table[block, :3].copy()
    rows[:, 0] += nth.astype(np.uint64) * table[block, 3]
    return rows


def remote_descs(descs: Any, mem_type: str | None = None) -> nixlRemoteDList:
    """What `nixl_agent.get_remote_descs` documents."""
    if isinstance(descs, nixlRemoteDList):
        return descs
    if not isinstance(descs, list):
        raise nixlInvalidParamError("a list of (address, bytes, device, agent name) is needed")
    kind, rows = _collect(descs, mem_type, arity=4)
    return nixlRemoteDList(kind, rows)  # type: ignore[arg-type]


def reg_descs(descs: Any, mem_type: str | None = None) -> nixlRegDList:
    """What `nixl_agent.get_reg_descs` documents."""
    if isinstance(descs, nixlRegDList):
        return descs
    if isinstance(descs, nixlXferDList):
        raise nixlInvalidParamError("a transfer list was given where memory is registered")
    kind, rows = _collect(descs, mem_type, arity=4)
    return nixlRegDList(kind, rows)


def xfer_descs(descs: Any, mem_type: str | None = None) -> nixlXferDList:
    """What `nixl_agent.get_xfer_descs` documents."""
    if isinstance(descs, nixlXferDList):
        return descs
    if isinstance(descs, nixlRegDList):
        raise nixlInvalidParamError("a registration list was given: use its trim()")
    kind, rows = _collect(descs, mem_type, arity=3)
    return nixlXferDList(kind, rows)


def _collect(
    descs: Any, mem_type: str | None, arity: int
) -> tuple[nixl_mem_t, npt.NDArray[Any] | list[tuple[Any, ...]]]:
    if _is_device_array(descs):
        return _collect_device_arrays([descs])
    if isinstance(descs, list) and _is_device_array(descs[0]):
        return _collect_device_arrays(descs)
    if _is_tensor(descs):
        return _collect_tensors([descs])
    if isinstance(descs, list) and _is_tensor(descs[0]):
        return _collect_tensors(descs)
    if not isinstance(descs, list | np.ndarray):
        raise nixlInvalidParamError(f"no descriptors can be made from {type(descs).__name__}")
    if mem_type is None:
        raise nixlInvalidParamError("mem_type is needed for descriptors that are plain numbers")
    kind = MEMORY_TYPES[mem_type]
    if isinstance(descs, np.ndarray):
        return kind, descs
    for row in descs:
        if not isinstance(row, tuple) or len(row) != arity:
            raise nixlInvalidParamError(f"expected tuples of {arity} fields, got {row!r}")
    return kind, descs


def _is_tensor(value: object) -> bool:
    # By its methods, so that torch need not be installed, let alone imported.
    return hasattr(value, "data_ptr") and hasattr(value, "is_contiguous")


def _is_device_array(value: object) -> bool:
    # A CPU tensor of torch has the attribute too, but raises on use.
    return not _is_tensor(value) and hasattr(value, "__cuda_array_interface__")


def _collect_device_arrays(arrays: list[Any]) -> tuple[nixl_mem_t, npt.NDArray[np.uint64]]:
    """GPU arrays of any library, e.g. CuPy, by the CUDA array interface."""
    rows = []
    for array in arrays:
        face = array.__cuda_array_interface__
        itemsize = np.dtype(face["typestr"]).itemsize
        nbytes = int(np.prod(face["shape"], dtype=np.int64)) * itemsize
        packed: list[int] = []
        step = itemsize
        for extent in reversed(face["shape"]):
            packed.insert(0, step)
            step *= extent
        if face.get("strides") not in (None, tuple(packed)):
            raise nixlInvalidParamError("GPU arrays must be contiguous")
        device = getattr(array, "device", 0)
        rows.append((face["data"][0], nbytes, int(getattr(device, "id", device))))
    if len({row[2] for row in rows}) != 1:
        raise nixlInvalidParamError("arrays of one list must be on one device")
    return nixl_mem_t.VRAM_SEG, np.array(rows, np.uint64)


def _collect_tensors(tensors: list[Any]) -> tuple[nixl_mem_t, npt.NDArray[np.uint64]]:
    if len({str(tensor.device) for tensor in tensors}) != 1:
        raise nixlInvalidParamError("tensors of one list must be on one device")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise nixlInvalidParamError("tensors must be contiguous")
    on_cpu = tensors[0].device.type == "cpu"
    device = 0 if on_cpu else tensors[0].get_device()
    rows = [(t.data_ptr(), t.numel() * t.element_size(), device) for t in tensors]
    return (
        nixl_mem_t.DRAM_SEG if on_cpu else nixl_mem_t.VRAM_SEG,
        np.array(rows, np.uint64),
    )
