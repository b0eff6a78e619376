"""NIXL's constants and enums (values of `nixl._bindings`)."""

from __future__ import annotations

import enum
from typing import Final

NIXL_INIT_AGENT: Final = ""
DEFAULT_COMM_PORT: Final = 8888


class nixl_mem_t(enum.IntEnum):
    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):
    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_thread_sync_t(enum.IntEnum):
    NONE = 0
    STRICT = 1
    RW = 2
    DEFAULT = 0


MEMORY_TYPES: Final = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}
OPERATIONS: Final = {"READ": nixl_xfer_op_t.NIXL_READ, "WRITE": nixl_xfer_op_t.NIXL_WRITE}
