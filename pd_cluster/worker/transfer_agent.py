"""The transfer library that the configuration names, as a worker's agent."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

from pd_cluster.errors import StartError
from pd_transfer import agent, nixl_agent


def require_backend(backend: Literal["ucx", "nixl"]) -> None:
    """Raises StartError, naming the package, where a backend's library is not installed here."""
    module, package = {"ucx": ("ucxx", "ucxx-cu12"), "nixl": ("nixl_cu12", "nixl-cu12")}[backend]
    if importlib.util.find_spec(module) is None:
        raise StartError(f"transfer.backend {backend} needs the package {package}: install it")


def make_transfer_agent(
    backend: Literal["ucx", "nixl"], name: str, secret: bytes, host: str, ucx: Mapping[str, str]
) -> nixl_agent:
    """An agent that peers reach at `host`; `ucx` are UCX's settings, without their prefix.

    With "nixl" UCX is the wheel's own and takes its settings from the environment alone; UCXX is
    then not imported. Raises StartError where the library is not installed.
    """
    require_backend(backend)
    if backend == "nixl":
        return agent("nixl", name=name, secret=secret)
    # Imported here: the wheel's UCX and UCXX's cannot share a process.
    from pd_transfer.ucx import UcxOptions

    return agent("ucx", name=name, secret=secret, options=UcxOptions(host=host, settings=ucx))
