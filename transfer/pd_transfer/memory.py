"""The part of `nixl_agent` that is about memory: describing and registering it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from pd_transfer.base import AgentBase
from pd_transfer.collect import reg_descs, remote_descs, xfer_descs
from pd_transfer.descriptors import nixlRegDList, nixlRemoteDList, nixlXferDList
from pd_transfer.errors import (
    nixlNotFoundError,
    nixlNotSupportedError,
)
from pd_transfer.serialized import deserialize, serialize

logger: Final = logging.getLogger(__name__)


class MemoryCalls(AgentBase):
    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """Descriptors to register.

        Args:
            descs: a ready list; 4-tuples (address, bytes, device, meta) or an Nx3 (u)int64 array,
                both with `mem_type`; a contiguous tensor or a list of such on one device.
            mem_type: "DRAM", "VRAM", or another of NIXL's names, which cannot be registered here.

        Raises:
            nixlInvalidParamError: misuse; upstream logs and returns None.
            KeyError: unknown `mem_type`.
        """
        return reg_descs(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """Descriptors to transfer: as `get_reg_descs`, with 3-tuples."""
        return xfer_descs(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList:
        """From 4-tuples (address, bytes, device, agent name); raises as `get_reg_descs`."""
        return remote_descs(descs, mem_type)

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList) -> bytes:
        """Bytes for `deserialize_descs` elsewhere. Not upstream's pickle: safe to read."""
        return serialize(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> nixlXferDList | nixlRegDList:
        """
        Raises:
            nixlMismatchError: not made by `get_serialized_descs`.
        """
        return deserialize(serialized_descs)

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList:
        """Let peers that were given later metadata write to and read from this memory.

        The memory must stay mapped until it is deregistered. For that of a GPU this process needs
        CUDA's driver, and UCX its CUDA transports.

        Raises:
            nixlNotFoundError: no backend for this memory type: for VRAM, no GPU here.
            nixlInvalidParamError: VRAM that is not in the memory of the GPU that it names.
            nixlBackendError: UCX could not move it.
        """
        self._check_backends(backends)
        descs = reg_descs(reg_list, mem_type)
        if not self.backends or descs.getType() not in self._backend.memory_types():
            raise nixlNotFoundError(f"no backend registers {descs.getType().name} here")
        self._backend.register(descs.getType(), descs.rows)
        self._state.regions.add(descs.getType(), descs.rows)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Take back what was registered, all or nothing. Nothing lands there after it returns.

        Raises:
            nixlNotFoundError: not registered like this.
            nixlNotAllowedError: a transfer still uses it.
        """
        self._check_backends(backends)
        self._state.regions.remove(dereg_list.getType(), dereg_list.rows)
        self._backend.deregister(dereg_list.getType(), dereg_list.rows)

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """For storage backends only; UCX has nothing to tell, upstream neither.

        Raises:
            ValueError: no such backend was created.
            nixlNotSupportedError: otherwise.
        """
        if backend not in self.backends:
            raise ValueError(f"backend {backend!r} was not created, only {list(self.backends)}")
        reg_descs(reg_list, mem_type)
        raise nixlNotSupportedError(f"backend {backend!r} cannot be queried for memory")
