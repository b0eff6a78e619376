"""A hardware description from measured steps: what a machine reaches, for the model it was measured
with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pd_cluster.simulate.hardware import Hardware, ModelShape, StepTimes
from pd_cluster.worker.instructions import Batch

# By how much each parameter is moved up and down, until none improves the fit; then the next.
_FACTORS = (4.0, 2.0, 1.4, 1.1, 1.03, 1.01)
_FITTED = ("flops", "memory_bandwidth", "step_overhead_s")


def fit(model: ModelShape, steps: Sequence[tuple[Batch, float]], known: Hardware) -> Hardware:
    """`known` with the FLOP/s, the bytes/s and the overhead by which the model's steps take what
    was measured (seconds): the least mean square of the logarithm of their ratio.
    """
    best, error = known, _error(known, model, steps)
    for factor in _FACTORS:
        improved = True
        while improved:
            improved = False
            for name in _FITTED:
                for by in (factor, 1 / factor):
                    other = replace(best, **{name: getattr(best, name) * by})
                    found = _error(other, model, steps)
                    if found < error:
                        best, error, improved = other, found, True
    return best


def mean_deviation(
    hardware: Hardware, model: ModelShape, steps: Sequence[tuple[Batch, float]]
) -> float:
    """Mean absolute deviation of the steps' modelled times, as a part of what was measured."""
    times = StepTimes(hardware, model)
    parts = [abs(times.step_s(batch) / seconds - 1) for batch, seconds in steps]
    return sum(parts) / len(parts)


def _error(hardware: Hardware, model: ModelShape, steps: Sequence[tuple[Batch, float]]) -> float:
    times = StepTimes(hardware, model)
    return sum(math.log(times.step_s(batch) / seconds) ** 2 for batch, seconds in steps)
