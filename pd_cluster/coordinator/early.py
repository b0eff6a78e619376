"""Requests that come to a coordinator which has just (re)started, before its workers do.

A restarted coordinator learns of its workers by their next reports, within a heartbeat or two.
Until then nobody is refused for want of them.
"""

from __future__ import annotations

from pd_cluster.types import AttemptId, PlaceRequest, Role

# How long they are waited for, in heartbeats, from the first request on.
PATIENCE = 5.0

_ROLES: frozenset[Role] = frozenset(("prefill", "decode"))


class EarlyRequests:
    """At most `most` of them; all times are seconds of one clock."""

    def __init__(self, heartbeat_s: float, most: int) -> None:
        self._patience_s = PATIENCE * heartbeat_s
        self._most = most
        self._until: float | None = None
        self._seen: set[Role] = set()
        self.requests: dict[AttemptId, PlaceRequest] = {}

    def seen(self, role: Role) -> None:
        """A worker of that role has reported."""
        self._seen.add(role)

    def waits(self, request: PlaceRequest, now: float) -> bool:
        """Keeps the request if it is too early to say that there are no workers."""
        if self._until is None:
            self._until = now + self._patience_s
        if self._over(now) or len(self.requests) >= self._most:
            return False
        self.requests[request.attempt] = request
        return True

    def take(self, now: float) -> list[PlaceRequest]:
        """All of them, once each role has reported or has not for too long."""
        if not self.requests or not self._over(now):
            return []
        requests, self.requests = list(self.requests.values()), {}
        return requests

    def _over(self, now: float) -> bool:
        return self._seen >= _ROLES or (self._until is not None and now >= self._until)
