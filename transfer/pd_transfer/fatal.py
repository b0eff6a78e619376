"""Keeps UCX from ending this process because a peer's has ended.

Shared memory needs endpoints without error handling. On those UCX answers a failed read of the
peer's memory, as when the peer was killed amid a transfer, by logging at its level FATAL, whose
default handler aborts. Where a handler of ours stops such a message first, the caller goes on and
returns an error, which closes that link alone. (Failed assertions do not pass this way; they
still abort.)
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
from typing import Final

logger: Final = logging.getLogger("pd_transfer")

_STOP, _CONTINUE = 0, 1
_ERROR: Final = 1  # 0 is FATAL

# ucs_log_func_t: file, line, function, level, component, format, va_list (passed by reference).
_Handler: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
)


_libc: Final = ctypes.CDLL(None)


def _handle(
    file: bytes, line: int, function: bytes, level: int, component: int, text: bytes, args: int
) -> int:
    if level > _ERROR:
        return _CONTINUE
    # Errors come from peers' deaths and are told by exceptions, so they need not fill stdout,
    # where UCX would write them.
    message = ctypes.create_string_buffer(512)
    _libc.vsnprintf(message, ctypes.c_size_t(len(message)), text, ctypes.c_void_p(args))
    logger.info("UCX: %s", message.value.decode(errors="replace"))
    return _STOP


_handler: Final = _Handler(_handle)


@functools.cache
def survive() -> None:
    """Install the handler, once, for the life of the process."""
    ucs = ctypes.CDLL("libucs.so.0")
    ucs.ucs_log_push_handler(_handler)
    # UCX may still log when Python is gone.
    atexit.register(ucs.ucs_log_pop_handler)
