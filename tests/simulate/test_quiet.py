"""Steps taken in together are those that the scheduler would have planned one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.simulate import worker
from pd_cluster.simulate.cluster import ClusterShape, Simulation, priors
from pd_cluster.simulate.figures import Slo, figures
from pd_cluster.simulate.hardware import HARDWARE, MODELS, StepTimes
from pd_cluster.simulate.trace import TraceRequest, conversations

TIMES = StepTimes(HARDWARE["h100"], MODELS["llama-3.1-8b"])
SHAPE = ClusterShape(prefill=2, decode=2, num_pages=2000, page_size=16)
PLENTY = conversations(10, seed=4, rate=4.0, pause_s=1.0)
SHORT = [
    TraceRequest(
        0.5 * n, ((n, 300),), max_tokens=400, answer_token=1000 + n, priority=int(n % 4 == 3)
    )
    for n in range(14)
]


@pytest.mark.parametrize(
    ("trace", "shape"),
    [
        (PLENTY, SHAPE),
        (PLENTY, replace(SHAPE, num_pages=400, page_size=512)),
        (PLENTY, replace(SHAPE, num_pages=1500, host_pages=6000)),
        # Retractions and preemptions.
        (SHORT, ClusterShape(prefill=1, decode=1, num_pages=100, page_size=16)),
    ],
)
def test_figures_are_the_same_as_step_by_step(
    trace: list[TraceRequest], shape: ClusterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, planned = simulate(trace, shape)
    monkeypatch.setattr(worker, "WORTHWHILE", float("inf"))
    alone, planned_alone = simulate(trace, shape)
    assert figures(together, Slo()) == figures(alone, Slo())
    assert sorted(together.gaps) == sorted(alone.gaps)
    for one, other in zip(together.requests, alone.requests, strict=True):
        assert one == other
    for one_worker, other_worker in zip(
        together.workers.values(), alone.workers.values(), strict=True
    ):
        assert one_worker.steps == other_worker.steps
        assert one_worker.busy_s == other_worker.busy_s
    assert together.state.rates.decode.coefficients.tolist() == (
        alone.state.rates.decode.coefficients.tolist()
    )
    assert planned < planned_alone / 2


def simulate(trace: list[TraceRequest], shape: ClusterShape) -> tuple[Simulation, int]:
    """The simulation at its end, and how often the schedulers planned."""
    scheduling = Scheduling(
        placement="cost", priors=priors(TIMES), enable_priority_scheduling=trace is SHORT
    )
    simulation = Simulation(trace, shape, TIMES, scheduling)
    planned = 0
    for each in simulation.workers.values():
        plan = each.scheduler.plan

        def count(now: float, plan: object = plan) -> object:
            nonlocal planned
            planned += 1
            return plan(now)  # type: ignore[operator]

        each.scheduler.plan = count  # type: ignore[method-assign, assignment]
    simulation.run()
    simulation.state.validate()
    for each in simulation.workers.values():
        each.scheduler.validate()
        # What the last answer left in the pool may still be on its way to host memory.
        assert each.scheduler.idle or shape.host_pages
    return simulation, planned
