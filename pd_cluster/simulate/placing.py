"""How long one placement takes the coordinator, by the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pd_cluster.config import Config
from pd_cluster.coordinator.prefix_hash import block_hashes, pack_hashes
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.coordinator.state import CoordinatorState
from pd_cluster.simulate.figures import Figures
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    PlaceRequest,
    Role,
    WorkerId,
    WorkerReport,
)

PAGE_SIZE = 64
# Prompts share the beginnings of so many texts, and go on by themselves.
TEXTS, SHARED, OWN = 300, (2_000, 12_000), 4_000
WARM_UP = 300


def placement_seconds(
    clock: Callable[[], float], workers: Sequence[int] = (10, 100, 1000), count: int = 1500
) -> Figures:
    """Median and 99th percentile of one `place` with so many workers of each role, by cost.

    `clock` gives real seconds; the thread's own time is the one that a busy machine leaves alone.
    """
    found: Figures = {}
    for number in workers:
        times = _times(clock, number, count)
        found[f"placement.{number}.p50_s"] = float(np.quantile(times, 0.5))
        found[f"placement.{number}.p99_s"] = float(np.quantile(times, 0.99))
    return found


def _times(clock: Callable[[], float], workers: int, count: int) -> list[float]:
    state = CoordinatorState(
        Config(max_queued_requests=count), Scheduling(placement="cost"), page_size=PAGE_SIZE
    )
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        for index in range(workers):
            state.report(_report(role, index), 0.0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1 << 30, SHARED[1], dtype=np.int32) for _ in range(TEXTS)]
    times: list[float] = []
    for index in range(WARM_UP + count):
        shared = texts[index % TEXTS][: rng.integers(*SHARED)]
        tokens = np.concatenate([shared, rng.integers(0, 1 << 30, OWN, dtype=np.int32)])
        # As many come as the workers can do, each some seconds of work.
        now = index * 20.0 / workers
        request = PlaceRequest(
            attempt=AttemptId(str(index), 0),
            gateway="gateway-0",
            prompt_len=len(tokens),
            max_tokens=300,
            timeout_s=1e9,
            blocks=pack_hashes(block_hashes(tokens, PAGE_SIZE)),
        )
        started = clock()
        state.place(request, now)
        if index >= WARM_UP:
            times.append(clock() - started)
        if index >= 2 * workers:
            old = AttemptId(str(index - 2 * workers), 0)
            state.ended(AttemptEnded(attempt=old, outcome="finished"), now)
    return times


def _report(role: Role, index: int) -> WorkerReport:
    tokens = 50_000 * PAGE_SIZE
    return WorkerReport(
        worker=WorkerId(f"{role}-{index}", "0"),
        role=role,
        signature={},
        capacity=tokens,
        available=tokens,
        running=0,
        waiting=0,
        routes=("remote", "remote+pull", "local"),
    )
