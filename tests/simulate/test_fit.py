"""Hardware as measured: a fit finds what the times were made with."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.simulate.fit import fit, mean_deviation
from pd_cluster.simulate.hardware import MODELS, Hardware, StepTimes
from pd_cluster.types import AttemptId
from pd_cluster.worker.instructions import Batch, Row

MODEL = MODELS["smollm2-135m"]
START = Hardware(
    flops=1e12,
    memory_bandwidth=1e11,
    memory=1e10,
    nic_bandwidth=1e9,
    flops_efficiency=1.0,
    memory_efficiency=1.0,
)


def row(start: int, length: int) -> Row:
    none = np.empty(0, np.int32)
    return Row(AttemptId("a", 0), np.zeros(length, np.int32), start, none, None)


def test_a_fit_finds_what_the_times_were_made_with() -> None:
    true = Hardware(5e10, 8e9, 1e10, 1e9, flops_efficiency=1.0, memory_efficiency=1.0,
                    step_overhead_s=4e-3)  # fmt: skip
    times = StepTimes(true, MODEL)
    batches = [Batch([], [row(start, n)]) for start in (0, 512) for n in (16, 128, 512)]
    batches += [Batch([row(held, 1)] * count, []) for held in (64, 1024) for count in (1, 4, 16)]
    steps = [(batch, times.step_s(batch)) for batch in batches]
    found = fit(MODEL, steps, START)
    assert mean_deviation(true, MODEL, steps) == 0
    assert mean_deviation(found, MODEL, steps) < 0.02
    assert found.flops == pytest.approx(true.flops, rel=0.05)
    assert found.memory_bandwidth == pytest.approx(true.memory_bandwidth, rel=0.1)
    assert found.nic_bandwidth == START.nic_bandwidth
