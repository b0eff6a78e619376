"""`nixl_agent_config`: what NIXL's callers configure an agent with."""

from __future__ import annotations

from collections.abc import Sequence

from pd_transfer.enums import DEFAULT_COMM_PORT, nixl_thread_sync_t


class nixl_agent_config:
    """Settings of an agent, by NIXL 1.5's names.

    `enable_listen_thread` accepts metadata on `listen_port` (0: any), see `nixl_agent.listen_port`;
    `capture_telemetry` records each transfer's times, as the environment's
    ``NIXL_TELEMETRY_ENABLE=y`` does. The others have no effect here: the agent always progresses
    by its own one thread and is always safe to call from several.

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
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, got {sync_mode!r}")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
