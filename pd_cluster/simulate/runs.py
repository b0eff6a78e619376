"""Whole runs: one policy, several side by side, the check of placement, the smallest cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pd_cluster.coordinator.choice import RouteLimits, Weights
from pd_cluster.coordinator.placement import POLICIES
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.errors import ConfigError
from pd_cluster.simulate.cluster import ClusterShape, Simulation, priors
from pd_cluster.simulate.figures import Figures, Slo, figures
from pd_cluster.simulate.hardware import StepTimes
from pd_cluster.simulate.trace import TraceRequest, lru_hit_rate

# Of the best that one LRU cache of all prefill workers' pages would get.
LEAST_HIT_SHARE = 0.97
MAX_IMBALANCE = 1.15
# Of the bytes that a placement moves which knows only the prefill side's caches.
MAX_BYTES_SHARE = 0.8
# Workers of one role beyond which no plan is looked for.
MAX_PLANNED = 1024


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all runs share. `timed` is a clock of real seconds, for the coordinator's own time."""

    trace: list[TraceRequest]
    shape: ClusterShape
    times: StepTimes
    slo: Slo = Slo()
    schedule_policy: str = "fcfs"
    seed: int = 0
    limits: RouteLimits = RouteLimits(pull=True, local=True)
    timed: Callable[[], float] | None = None
    # Told of each run at its end, by its placement's name.
    watch: Callable[[str, Simulation], None] | None = None

    def run(self, placement: str) -> Figures:
        if placement not in POLICIES:
            raise ConfigError(f"unknown placement {placement!r}; allowed: {', '.join(POLICIES)}")
        limits = replace(
            self.limits, itl_limit_s=self.slo.itl_s, chunk_tokens=self.shape.local_tokens
        )
        scheduling = Scheduling(
            placement=placement,
            schedule_policy=self.schedule_policy,
            weights=Weights(bind_ahead_tokens=self.shape.chunk_tokens),
            limits=limits,
            priors=priors(self.times),
            seed=self.seed,
        )
        simulation = Simulation(self.trace, self.shape, self.times, scheduling, self.timed)
        simulation.run()
        if self.watch is not None:
            self.watch(placement, simulation)
        found = figures(simulation, self.slo)
        if self.timed:
            found["coordinator.request_s"] = simulation.placing_s / len(self.trace)
        return found


def compare(experiment: Experiment, placements: list[str]) -> Figures:
    """The figures of each policy, its name in front of theirs."""
    return {
        f"{placement}.{name}": value
        for placement in placements
        for name, value in experiment.run(placement).items()
    }


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "at most" if self.at_most else "at least"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.name} is {self.value:.4g}, {sign} {self.limit:.4g}"


def check(experiment: Experiment) -> tuple[Figures, list[Target]]:
    """Whether placement by cost is as good as it must be, on a trace that knows no answers.

    All by the route `remote`, which is what the yardstick knows of.
    """
    remote = replace(experiment, limits=RouteLimits())
    cost, least, prefix = (
        remote.run(each) for each in ("cost", "least_loaded", "prefix_prefill_only")
    )
    shape = experiment.shape
    lru = lru_hit_rate(experiment.trace, shape.prefill * shape.num_pages, shape.page_size)
    targets = [
        Target("prefill.hit_rate", cost["prefill.hit_rate"], LEAST_HIT_SHARE * lru, at_most=False),
        Target("prefill.imbalance", cost["prefill.imbalance"], MAX_IMBALANCE),
        Target("ttft.p99_s (least_loaded's)", cost["ttft.p99_s"], least["ttft.p99_s"]),
        Target(
            f"transfer.bytes ({MAX_BYTES_SHARE} of prefix_prefill_only's)",
            cost["transfer.bytes"],
            MAX_BYTES_SHARE * prefix["transfer.bytes"],
        ),
        Target("ttft.p99_s (prefix_prefill_only's)", cost["ttft.p99_s"], prefix["ttft.p99_s"]),
        Target("itl.p99_s (prefix_prefill_only's)", cost["itl.p99_s"], prefix["itl.p99_s"]),
    ]
    found = {"lru.hit_rate": lru}
    for name, each in (
        ("cost", cost),
        ("least_loaded", least),
        ("prefix_prefill_only", prefix),
    ):
        found |= {f"{name}.{figure}": value for figure, value in each.items()}
    return found, targets


def check_routes(experiment: Experiment) -> tuple[Figures, list[Target]]:
    """Whether `remote+pull` and `local` are worth having, on a trace whose turns hold answers."""
    every = experiment.run("cost")
    remote = replace(experiment, limits=RouteLimits()).run("cost")
    targets = [
        Target(f"{name} (remote's alone)", every[name], remote[name])
        for name in ("prefill.computed_tokens", "ttft.p50_s", "ttft.p99_s")
    ]
    targets.append(Target("itl.p99_s", every["itl.p99_s"], experiment.slo.itl_s))
    found: Figures = {}
    for name, each in (("all_routes", every), ("remote_only", remote)):
        found |= {f"{name}.{figure}": value for figure, value in each.items()}
    return found, targets


def plan(experiment: Experiment) -> tuple[int, int, Figures]:
    """The smallest (prefill, decode) whose p99 times meet the SLO, fewest workers together.

    ConfigError if none of up to 1024 workers a side does.
    """
    slo = experiment.slo

    def run(prefill: int, decode: int) -> Figures:
        shape = replace(experiment.shape, prefill=prefill, decode=decode)
        return replace(experiment, shape=shape).run("cost")

    # Each side's need is nearly its own: find it with plenty of the other, then look around.
    plenty = experiment.shape.decode
    prefill = _least(lambda n: run(n, max(plenty, n))["ttft.p99_s"] <= slo.ttft_s)
    decode = _least(lambda n: run(prefill, n)["itl.p99_s"] <= slo.itl_s)
    while True:
        found = run(prefill, decode)
        if found["ttft.p99_s"] > slo.ttft_s:
            prefill += 1
        elif found["itl.p99_s"] > slo.itl_s:
            decode += 1
        else:
            return prefill, decode, found
        if max(prefill, decode) > MAX_PLANNED:
            raise ConfigError(f"no {MAX_PLANNED} workers a side meet the SLO")


def _least(meets: Callable[[int], bool]) -> int:
    """The least number that meets it, for what more never makes worse."""
    high = next((n for n in _powers() if meets(n)), None)
    if high is None:
        raise ConfigError(f"not even {MAX_PLANNED} workers meet the SLO")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def _powers() -> Iterator[int]:
    number = 1
    while number <= MAX_PLANNED:
        yield number
        number *= 2
