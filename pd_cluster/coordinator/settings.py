"""How the coordinator schedules: what of the configuration it needs, and what is not set there."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster.coordinator.costs import Priors
from pd_cluster.coordinator.placement import RouteLimits, Weights


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`limits.pull` and `limits.local` say what is wanted; the workers' reports, what is there."""

    placement: str = "least_loaded"
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    # A full queue makes room for a higher priority by rejecting the lowest.
    enable_priority_scheduling: bool = False
    max_queued_per_tenant: int | None = None
    max_running_per_tenant: int | None = None
    weights: Weights = Weights()
    limits: RouteLimits = RouteLimits(pull=True, local=True)
    priors: Priors = field(default_factory=Priors)
    seed: int = 0
