"""The part of `nixl_agent` that is about its backends. There is one here, by the name "UCX"."""

from __future__ import annotations

import logging
from typing import Final

from pd_transfer.base import AgentBase
from pd_transfer.errors import nixlInvalidParamError, nixlNotFoundError

logger: Final = logging.getLogger("pd_transfer")


class BackendCalls(AgentBase):
    plugin_list: list[str]
    backend_mems: dict[str, list[str]]

    def get_plugin_list(self) -> list[str]:
        return list(self.plugin_list)

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Empty, with a warning, for an unknown one."""
        return self._memory() if self._known(backend, self.plugin_list) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """None of ours takes any."""
        self._known(backend, self.plugin_list)
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Empty, with a warning, for one that was not created."""
        return self._memory() if self._known(backend, self.backends) else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        self._known(backend, self.backends)
        return {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """
        Raises:
            nixlNotFoundError: unknown.
            nixlInvalidParamError: it exists, or parameters, of which there are none.
        """
        if backend not in self.plugin_list:
            raise nixlNotFoundError(f"no backend {backend!r}, only {self.plugin_list}")
        if backend in self.backends:
            raise nixlInvalidParamError(f"backend {backend!r} exists already")
        if initParams:
            raise nixlInvalidParamError(f"backend {backend!r} takes no parameters")
        self.backends[backend] = self._backend
        self.backend_mems[backend] = self._memory()

    def _memory(self) -> list[str]:
        return [kind.name for kind in self._backend.memory_types()]

    @staticmethod
    def _known(backend: str, among: object) -> bool:
        assert isinstance(among, list | dict)
        if backend in among:
            return True
        logger.warning("there is no backend %r here", backend)
        return False
