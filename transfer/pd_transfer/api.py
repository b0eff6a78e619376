"""`nixl_agent`: NIXL's Python API on our backends."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Final

from pd_transfer.base import as_name
from pd_transfer.config import nixl_agent_config
from pd_transfer.enums import (
    MEMORY_TYPES,
    OPERATIONS,
)
from pd_transfer.errors import (
    nixlNotFoundError,
)
from pd_transfer.exchange import MetadataCalls
from pd_transfer.memory import MemoryCalls
from pd_transfer.notifications import NotificationCalls
from pd_transfer.plugins import BackendCalls
from pd_transfer.state import Backend, Event, PeerState, State, Statistics
from pd_transfer.transfers import Prepared, TransferCalls

logger: Final = logging.getLogger(__name__)


class nixl_agent(MemoryCalls, MetadataCalls, TransferCalls, NotificationCalls, BackendCalls):
    """NIXL's agent, whole but for `prep_mem_view`, plus extensions.

    Differences from upstream, all on the safe side:

    - everything progresses by the agent's own thread: a notification leaves without polling;
    - misuse raises, where upstream logs and returns None; a released handle raises on use;
    - registered memory that a transfer still uses cannot be deregistered;
    - ``"ERR"`` is never returned: failures are raised, as upstream does in practice.

    All methods may be called from any thread, also from the event callback.

    Args:
        agent_name: unique among the agents that meet.
        nixl_conf: see `nixl_agent_config`.
        instantiate_all: no difference, there is one backend an agent.
        secret: what transfer connections must prove to know. Without one, the agent makes its own
            and puts it in its metadata: whoever has the metadata may write, as upstream.
        open_backend: builds the backend; UCX if left out. See `pd_transfer.agent`.

    Raises:
        ValueError: empty name or secret.
        OSError: a port to listen on is taken.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
        *,
        secret: bytes | None = None,
        open_backend: Callable[[State], Backend] | None = None,
    ) -> None:
        if not agent_name:
            raise ValueError("an agent needs a name")
        if secret is not None and not secret:
            raise ValueError("an empty secret protects nothing: leave it out or give one")
        config = nixl_conf or nixl_agent_config()
        if instantiate_all and nixl_conf is not None:
            logger.warning("instantiate_all is ignored: the configuration names the backends")
        if open_backend is None:
            # Imported late: the fake backend must work where UCX is not installed.
            from pd_transfer.ucx import UcxBackend, UcxOptions

            options = UcxOptions()

            def open_backend(state: State) -> Backend:
                return UcxBackend(state, options, secret)

        self.name = agent_name
        self.nixl_mems = MEMORY_TYPES
        self.nixl_ops = OPERATIONS
        self.notifs = {}
        self._secret = secret
        self._telemetry = _telemetry_wanted(config)
        self._state = State(agent_name)
        self._backend = open_backend(self._state)
        self.plugin_list = [self._backend.kind]
        self.backends = {}
        self.backend_mems = {}
        for kind in self.plugin_list if nixl_conf is None else config.backends:
            if kind in self.plugin_list:
                self.create_backend(kind)
            else:
                logger.warning("there is no backend %r: it is left out", kind)
        self._ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self._prepared: dict[int, Prepared] = {}
        # Not a __del__: it also runs at interpreter exit, before modules are torn down.
        self._finalizer = weakref.finalize(self, self._backend.close)
        self._listener = None
        if config.enable_listen:
            try:
                self._listener = self._listen(config.port)
            except OSError:
                self._finalizer()
                raise

    # Extensions to NIXL.

    def set_event_callback(self, callback: Callable[[Event], None] | None) -> None:
        """Extension: be told that a notification arrived, a transfer ended or a peer died.

        Called from the agent's thread after the fact can be seen by the other methods. It must be
        quick: nothing moves meanwhile. Events from before are not told.
        """
        self._state.callback = callback

    def peer_state(self, agent: str | bytes) -> PeerState:
        """Extension: "alive" or "dead" (crashed, killed or closed). A stopped process is alive.

        Raises:
            nixlNotFoundError: no such agent was added here or has connected.
        """
        state = self._backend.peer_state(as_name(agent))
        if state is None:
            raise nixlNotFoundError(f"unknown agent {as_name(agent)!r}")
        return state

    def peer_is_quiet(self, agent: str | bytes) -> bool:
        """Extension: nothing from this peer can land in this agent's memory any more.

        True for a peer that is dead (it is called dead only then) or never connected.
        """
        return self._backend.peer_is_quiet(as_name(agent))

    def statistics(self) -> Statistics:
        """Extension: a frozen snapshot of the counters."""
        return self._state.statistics()

    def close(self) -> None:
        """Extension: end the agent. Peers see it as dead. Twice is once."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._finalizer()

    def __enter__(self) -> nixl_agent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _telemetry_wanted(config: nixl_agent_config) -> bool:
    """As upstream, the environment has the last word."""
    word = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
    return word in ("y", "yes", "on", "1", "true", "enable") if word else config.capture_telemetry
