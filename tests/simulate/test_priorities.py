"""The urgent beside work that fills the cluster, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.simulate.cluster import ClusterShape, Request, Simulation, priors
from pd_cluster.simulate.hardware import HARDWARE, MODELS, StepTimes
from pd_cluster.simulate.trace import TraceRequest

TIMES = StepTimes(HARDWARE["h100"], MODELS["llama-3.1-8b"])
# Memory for about eight of the 40 that are there from the start.
SHAPE = ClusterShape(prefill=1, decode=2, num_pages=600, page_size=16, chunk_tokens=512)
LOW = [TraceRequest(0.0, ((n, 1000),), max_tokens=1500, answer_token=10_000 + n) for n in range(40)]
HIGH = [
    TraceRequest(
        1.0 + 0.7 * n, ((1000 + n, 400),), max_tokens=60, answer_token=20_000 + n, priority=1
    )
    for n in range(60)
]
PRIORITIES = Scheduling(
    placement="cost",
    priors=priors(TIMES),
    enable_priority_scheduling=True,
    retraction_policy="priority",
)


def simulate(trace: list[TraceRequest], scheduling: Scheduling) -> Simulation:
    simulation = Simulation(trace, SHAPE, TIMES, scheduling)
    simulation.run()
    simulation.state.validate()
    for worker in simulation.workers.values():
        worker.scheduler.validate()
        assert worker.scheduler.idle
    assert all(request.tokens == request.trace.max_tokens for request in simulation.requests)
    return simulation


def p99(requests: list[Request]) -> float:
    """Seconds from the arrival to the last token."""
    times = [each.last_token - each.arrival for each in requests if each.trace.priority]
    return float(np.quantile(times, 0.99))


def test_high_priorities_hardly_notice_what_waits_behind_them() -> None:
    """Case 15, by priority: their 99th percentile stays within 1.5 times of their time alone, and
    whoever made room for them is retracted a few times, resumes and ends.
    """
    alone = p99(simulate(HIGH, PRIORITIES).requests)
    beside = simulate(LOW + HIGH, PRIORITIES)
    assert p99(beside.requests) <= 1.5 * alone
    retractions = [each.retractions for each in beside.requests if not each.trace.priority]
    assert 0 < max(retractions) <= 6
    assert not any(each.retractions for each in beside.requests if each.trace.priority)
    causes = sum(
        (worker.scheduler.decode.retractions for worker in beside.workers.values()),
        start=type(next(iter(beside.workers.values())).scheduler.decode.retractions)(),
    )
    assert causes["preemption"]
    # Without priorities they wait for their turn.
    equal = replace(PRIORITIES, enable_priority_scheduling=False)
    assert p99(simulate(LOW + HIGH, equal).requests) > 3 * alone
