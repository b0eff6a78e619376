"""A standalone KV transfer library with NIXL's Python API, on UCX.

    from pd_transfer import agent

`agent` makes one; everything else bears NIXL's names. README.md shows two processes at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pd_transfer.api import nixl_agent
from pd_transfer.config import nixl_agent_config
from pd_transfer.descriptors import nixlRegDList, nixlRemoteDList, nixlXferDList
from pd_transfer.enums import (
    DEFAULT_COMM_PORT,
    NIXL_INIT_AGENT,
    nixl_mem_t,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
)
from pd_transfer.errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from pd_transfer.fake import FakeBackend, FakeNetwork
from pd_transfer.handles import nixl_prepped_dlist_handle, nixl_xfer_handle
from pd_transfer.state import Backend, Event, PeerState, State, Statistics
from pd_transfer.telemetry import nixlXferTelemetry

if TYPE_CHECKING:
    from pd_transfer.ucx import UcxOptions

# As module attributes too, by upstream's names.
DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
HAVE_UCX_GPU_DEVICE_API = False
nixl_backend_handle = Backend

__all__ = [
    "BLK_SEG",
    "DEFAULT_COMM_PORT",
    "NIXL_INIT_AGENT",
    "DRAM_SEG",
    "FILE_SEG",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_READ",
    "NIXL_WRITE",
    "OBJ_SEG",
    "VRAM_SEG",
    "Event",
    "FakeNetwork",
    "PeerState",
    "Statistics",
    "agent",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_backend_handle",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_mem_t",
    "nixl_prepped_dlist_handle",
    "nixl_status_t",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
    "nixl_xfer_op_t",
]


def agent(
    backend: Literal["ucx", "nixl", "fake"] = "ucx",
    *,
    name: str,
    config: nixl_agent_config | None = None,
    secret: bytes | None = None,
    options: UcxOptions | None = None,
    network: FakeNetwork | None = None,
) -> nixl_agent:
    """Make an agent.

    Args:
        backend: "ucx" moves data between processes, "nixl" does so by the upstream wheel (see
            `pd_transfer.upstream` for what that cannot do), "fake" within this one, for tests.
        name: unique among the agents that meet.
        secret: what all agents of a cluster share; see `nixl_agent`.
        options: addresses and transports of "ucx", `pd_transfer.ucx.UcxOptions`.
        network: where agents of "fake" meet; needed there.

    Raises:
        ValueError: an argument that is empty, missing, or of another backend.
        ModuleNotFoundError: "nixl" without the wheel, the extra `nixl`.
        RuntimeError: "nixl" in a process that has loaded UCXX, which brings another UCX.
    """
    if backend == "fake":
        if network is None or options is not None:
            raise ValueError('backend "fake" takes a network and no options')

        def open_fake(state: State) -> Backend:
            return FakeBackend(state, network, secret)

        return nixl_agent(name, config, secret=secret, open_backend=open_fake)
    if network is not None:
        raise ValueError(f'backend "{backend}" takes no network')
    if backend == "nixl":
        if options is not None:
            raise ValueError('backend "nixl" takes no options')
        from pd_transfer.upstream import NixlBackend

        return nixl_agent(name, config, secret=secret, open_backend=NixlBackend)
    if backend != "ucx":
        raise ValueError(f'backend is "ucx", "nixl" or "fake", not {backend!r}')
    # Imported late: the fake backend must work where UCX is not installed.
    from pd_transfer.ucx import UcxBackend, UcxOptions

    chosen = options or UcxOptions()

    def open_ucx(state: State) -> Backend:
        return UcxBackend(state, chosen, secret)

    return nixl_agent(name, config, secret=secret, open_backend=open_ucx)
