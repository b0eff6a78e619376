"""An idle worker's step waits for prompts that usually come together, and for nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.worker.gathering import GAP_S, WINDOW, Gathering
from tests.worker.harness import World

STEP_S = 1.0


def burst(gathering: Gathering, start: float, gaps: list[float]) -> None:
    """Prompts that find the worker idle, and others after each of the gaps."""
    gathering.arrived(start, idle=True)
    for at in np.cumsum(gaps):
        gathering.arrived(start + float(at), idle=False)


def after(*gaps: float) -> Gathering:
    """Which has seen a step, and then one burst."""
    gathering = Gathering()
    gathering.ended(STEP_S)
    burst(gathering, 10.0, list(gaps))
    return gathering


def test_who_comes_alone_never_waits() -> None:
    gathering = after()
    for start in (20.0, 30.0):
        burst(gathering, start, [])
        assert gathering.begin_at() <= start


def test_as_many_are_waited_for_as_came_last_time() -> None:
    gathering = after(0.002, 0.002)
    gathering.arrived(20.0, idle=True)
    assert gathering.begin_at() == pytest.approx(20.0 + GAP_S)
    gathering.arrived(20.004, idle=False)
    assert gathering.begin_at() == pytest.approx(20.004 + GAP_S)
    gathering.arrived(20.008, idle=False)
    assert gathering.begin_at() <= 20.008


def test_the_first_waits_for_no_more_than_its_window() -> None:
    gathering = after(*[0.002] * 100)
    burst(gathering, 20.0, [0.009] * 30)
    assert gathering.begin_at() == pytest.approx(20.0 + WINDOW * STEP_S)


def test_who_comes_after_the_window_is_no_company() -> None:
    gathering = after(WINDOW * STEP_S + 0.01)
    gathering.arrived(20.0, idle=True)
    assert gathering.begin_at() <= 20.0


def test_once_nobody_came_nobody_is_waited_for() -> None:
    gathering = after(0.002)
    burst(gathering, 20.0, [])
    gathering.arrived(30.0, idle=True)
    assert gathering.begin_at() <= 30.0


def test_a_worker_computes_its_next_burst_in_one_step() -> None:
    """The first prompt of the first burst is computed alone; then the worker knows better."""
    world = World.make(0, pages=4000, chunk=256)
    prefill = world.worker("prefill-0")
    gathering = prefill.scheduler.gathering = Gathering()
    gathering.ended(STEP_S)
    prompts = np.random.default_rng(0).integers(1, 50, (8, 20)).astype(np.int32)
    rows = []
    for start, group in ((100.0, prompts[:4]), (200.0, prompts[4:])):
        for index, prompt in enumerate(group):
            world.now = start + index * 0.004
            world.request(prompt, name=f"{start}-{index}")
            for worker in (world.worker("decode-0"), prefill):
                while worker.mailbox:
                    world._do("mail", worker)
            if prefill.step is None and world._begin(prefill):
                assert prefill.step is not None
                rows.append(len(prefill.step.prefill))
        world.now += STEP_S
        world._end(prefill)
        assert prefill.scheduler.resume_at <= world.now
        world.run()
    assert rows[0] == 1
    assert rows[-1] == 4
