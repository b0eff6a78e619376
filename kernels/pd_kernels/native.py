"""Calling the compiled library through ctypes, which releases the GIL meanwhile."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from pd_kernels.build import build
from pd_kernels.registry import BackendUnavailable

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_CTYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}
_library: ctypes.CDLL | BackendUnavailable | None = None

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def library() -> ctypes.CDLL:
    """The compiled library, built at the first call. Raises `BackendUnavailable`; the first time,
    a line in the log says why."""
    global _library
    with _LOCK:
        if _library is None:
            try:
                _library = ctypes.CDLL(str(build()))
            except (BackendUnavailable, OSError) as error:
                _LOG.warning("kernels run as plain torch, several times slower: %s", error)
                _library = BackendUnavailable(str(error))
        if isinstance(_library, BackendUnavailable):
            raise _library
        return _library


def function(name: str, arguments: str) -> Callable[..., Any]:
    """The library's function `name`; `arguments` has a letter for each: p pointer, q int64, f
    float, i int. It returns an int."""
    found = library()[name]
    found.argtypes = [_CTYPES[letter] for letter in arguments.replace(" ", "")]
    found.restype = ctypes.c_int
    return found


def by_dtype(name: str, arguments: str) -> dict[torch.dtype, Callable[..., Any]]:
    """`function` of each dtype that the op is compiled for."""
    return {dtype: function(f"{name}_{suffix}", arguments) for dtype, suffix in SUFFIXES.items()}
