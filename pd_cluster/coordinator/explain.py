"""Why attempts were placed where they were, kept for a while, in words that travel as JSON."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from pd_cluster.coordinator.choice import Term
from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.coordinator.workers import Lease, Workers
from pd_cluster.types import AttemptId

# The youngest so many placements can be explained.
MAX_KEPT = 1000


class Explanations:
    """Names are looked up when a placement is made: later its workers may be gone."""

    def __init__(self) -> None:
        self._kept: OrderedDict[AttemptId, tuple[Lease, float, dict[str, list[str]]]] = (
            OrderedDict()
        )

    def add(self, lease: Lease, waited_s: float, cluster: Workers) -> None:
        names = {
            group: [_name(_fleet(cluster, group), term) for term in terms]
            for group, terms in lease.choice.reasons.items()
        }
        self._kept[lease.request.attempt] = (lease, waited_s, names)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def get(self, attempt: AttemptId) -> dict[str, Any] | None:
        if attempt not in self._kept:
            return None
        lease, waited_s, names = self._kept[attempt]
        choice = lease.choice
        return {
            "prefill": str(lease.placement.prefill),
            "decode": str(lease.placement.decode),
            "route": choice.route,
            "queue_s": waited_s,
            "prefill_s": choice.prefill_s,
            "prefill_held": choice.prefill_held,
            "decode_held": choice.decode_held,
            "prefill_below": choice.prefill_below,
            "decode_below": choice.decode_below,
            "candidates": {
                group: [
                    {
                        "worker": name,
                        "cost": term.cost,
                        "held": term.held,
                        "below": term.below,
                        **term.terms,
                    }
                    for name, term in zip(names[group], terms, strict=True)
                ]
                for group, terms in choice.reasons.items()
            },
        }


def _fleet(cluster: Workers, group: str) -> Fleet:
    return cluster.prefill if group == "prefill" else cluster.decode


def _name(fleet: Fleet, term: Term) -> str:
    return str(fleet.worker(term.slot))
