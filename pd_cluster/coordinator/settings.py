"""How the coordinator schedules: what of the configuration it needs, and what is not set there."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster.config import Config
from pd_cluster.coordinator.choice import RouteLimits, Weights
from pd_cluster.coordinator.costs import Priors
from pd_cluster.types import RetractionPolicy


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`limits.pull` and `limits.local` say what is wanted; the workers' reports, what is there."""

    placement: str = "cost"
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    # Higher priorities come first, a full queue makes room for them by rejecting the lowest, and
    # decode workers by retracting lower ones.
    enable_priority_scheduling: bool = False
    retraction_policy: RetractionPolicy = "length"
    max_queued_per_tenant: int | None = None
    max_running_per_tenant: int | None = None
    weights: Weights = Weights()
    limits: RouteLimits = RouteLimits(pull=True, local=True)
    priors: Priors = field(default_factory=Priors)
    seed: int = 0

    @classmethod
    def of(cls, config: Config) -> Scheduling:
        """What the configuration wants."""
        return cls(
            placement=config.placement,
            schedule_policy=config.schedule_policy,
            schedule_conservativeness=config.schedule_conservativeness,
            enable_priority_scheduling=config.enable_priority_scheduling,
            retraction_policy=config.retraction_policy,
            max_queued_per_tenant=config.max_queued_per_tenant,
            max_running_per_tenant=config.max_running_per_tenant,
            weights=Weights(
                bind_ahead_tokens=config.max_prefill_tokens or config.chunked_prefill_size
            ),
            limits=RouteLimits(
                pull="remote+pull" in config.routes,
                local="local" in config.routes,
                itl_limit_s=config.itl_limit_s,
                chunk_tokens=config.local_prefill_size,
            ),
        )
