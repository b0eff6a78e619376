"""`nixl_agent_config`: what NIXL's callers configure an agent with."""

from __future__ import annotations

from collections.abc import Sequence

from pd_transfer.enums import DEFAULT_COMM_PORT, nixl_thread_sync_t


class nixl_agent_config:
    """Settings of an agent, by NIXL 1.4's names.

    Only `backends` has an effect here: the agent always progresses by its own thread, is always
    safe to call from several threads, and has no metadata listener yet, so `enable_listen_thread`
    is refused by the agent rather than ignored.

    Raises:
        TypeError: `sync_mode` is not a `nixl_thread_sync_t`.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is None:
            sync_mode = (
                nixl_thread_sync_t.STRICT if enable_listen_thread else nixl_thread_sync_t.NONE
            )
        elif not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, got {sync_mode!r}")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
