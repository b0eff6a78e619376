"""What the coordinator counts: since its start, and who has how much placed now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pd_cluster.types import Outcome, PlaceRequest, Route


@dataclass(slots=True)
class CoordinatorStatistics:
    """Counters since the start."""

    placements: int = 0
    routes: dict[str, int] = field(default_factory=dict)
    rejections: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    leases_expired: int = 0

    def placed(self, route: Route) -> None:
        self.placements += 1
        self.routes[route] = self.routes.get(route, 0) + 1

    def rejected(self, reason: str) -> None:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def ended(self, outcome: Outcome) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


class Running:
    """The placed requests: prompt tokens and number by tenant, number by routing key."""

    def __init__(self) -> None:
        self.work_by_tenant: Counter[str] = Counter()
        self.by_tenant: Counter[str] = Counter()
        self.by_key: Counter[str] = Counter()

    def add(self, request: PlaceRequest) -> None:
        self._count(request, 1)

    def remove(self, request: PlaceRequest) -> None:
        self._count(request, -1)

    def _count(self, request: PlaceRequest, sign: int) -> None:
        changes = [
            (self.work_by_tenant, request.tenant, request.prompt_len),
            (self.by_tenant, request.tenant, 1),
        ]
        if request.routing_key:
            changes.append((self.by_key, request.routing_key, 1))
        for counter, key, amount in changes:
            counter[key] += sign * amount
            if not counter[key]:
                del counter[key]
