from __future__ import annotations

import pytest

from pd_cluster.worker.stages import STAGES, StageTimes, stages_of


def story(*moves: tuple[float, str]) -> list[tuple[float, str, str]]:
    return [(at, state, "") for at, state in moves]


@pytest.mark.parametrize(
    ("moves", "finished", "expected"),
    [
        (
            [(0, "awaiting"), (1, "reserved"), (3, "landing"), (6, "running"), (10, "done")],
            True,
            [("reserve", 1), ("prefill", 2), ("transfer", 3), ("decode", 4)],
        ),
        (
            [(0, "awaiting"), (1, "computing"), (3, "running"), (4, "done")],
            True,
            [("reserve", 1), ("prefill", 2), ("decode", 1)],
        ),
        (
            [(0, "awaiting"), (0, "reserved"), (2, "running"), (3, "done")],
            False,
            [("reserve", 0), ("prefill", 2), ("transfer", 0), ("decode", 1)],
        ),
        ([(0, "awaiting"), (1, "reserved"), (3, "done")], True, [("reserve", 1), ("prefill", 2)]),
        # Its prefill failed: nothing can be said of it.
        ([(0, "awaiting"), (1, "reserved"), (3, "done")], False, [("reserve", 1)]),
        ([(0, "awaiting"), (1, "reserved"), (3, "draining"), (4, "done")], False, [("reserve", 1)]),
        ([(0, "awaiting"), (5, "done")], False, []),
    ],
)
def test_stages(moves, finished, expected):
    assert list(stages_of(story(*moves), finished=finished)) == expected


def test_each_stage_has_a_histogram_from_the_start():
    times = StageTimes()
    assert tuple(times.histograms) == STAGES
    times.take(story((0, "awaiting"), (2, "computing")), finished=False)
    assert times.histograms["reserve"].snapshot().total == 2
    assert sum(times.histograms["decode"].snapshot().counts) == 0
