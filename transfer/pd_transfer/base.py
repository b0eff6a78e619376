"""What the parts of `nixl_agent` share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pd_transfer.errors import nixlNotFoundError
from pd_transfer.state import Backend, Peer, State


class AgentBase:
    name: str
    backends: dict[str, Backend]
    _state: State
    _backend: Backend
    _secret: bytes | None
    _epochs: itertools.count[int]

    def _peer(self, name: str) -> Peer:
        peer = self._state.peers.get(name)
        if peer is not None:
            return peer
        reason = self._backend.why_lost(name)
        if reason is not None:
            raise reason
        raise nixlNotFoundError(f"unknown agent {name!r}")

    def _check_backends(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.backends:
                raise nixlNotFoundError(f"no backend {name!r} here")


def as_name(agent: str | bytes) -> str:
    return agent.decode() if isinstance(agent, bytes) else agent
