"""The simulation bench's pure parts: which steps are measured, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pd_cluster.bench import simulation
from pd_cluster.bench.client import Answer
from pd_cluster.bench.engine_steps import DECODES, PREFILLS, batches
from pd_cluster.config import load_config
from pd_cluster.simulate.hardware import MODELS, Hardware, StepTimes, load_hardware
from pd_cluster.simulate.trace import ANSWERS, TraceRequest

HARDWARE = Hardware(5e10, 1e10, 16e9, 6e9, 1e-3, flops_efficiency=1, memory_efficiency=1, overlap=0)


def test_what_it_prints_is_a_description_that_can_be_simulated(tmp_path: Path) -> None:
    found = {
        f"simulation.hardware.{name}": getattr(HARDWARE, name)
        for name in (
            "flops",
            "memory_bandwidth",
            "step_overhead_s",
            "nic_bandwidth",
            "nic_latency_s",
        )
    }
    path = tmp_path / "hardware.yaml"
    path.write_text("\n".join(simulation.conclusions(found | {"simulation.real.x": 1.0})))
    assert load_hardware(str(path)) == HARDWARE


def test_the_simulated_side_has_every_compared_figure() -> None:
    trace = [
        TraceRequest(0.1 * n, ((0, 100), (1 + n, 50)), max_tokens=5, answer_token=ANSWERS + n)
        for n in range(4)
    ]
    model = replace(MODELS["smollm2-135m"], dtype_bytes=4)
    found = simulation._simulate(trace, load_config(), StepTimes(HARDWARE, model))
    assert found.keys() == set(simulation.COMPARED)
    assert found["cached_part"] > 0


def test_prompts_have_the_real_answers() -> None:
    turn = Answer(0.0, tokens=[7, 8])
    each = TraceRequest(
        0.0, ((0, 2), (ANSWERS, 30), (3, 1)), max_tokens=1, answer_token=ANSWERS + 1
    )
    first = simulation.FIRST_TOKEN_ID
    assert simulation._tokens(each, {0: turn}) == [first, first, 7, 8, first + 3]


def test_measured_steps_are_those_of_the_table_and_write_pages_of_their_own() -> None:
    for page_size in (1, 16):
        steps = batches(page_size)
        rows = [step.prefill[0] for step in steps if step.prefill]
        assert [(len(row.tokens), row.start) for row in rows[1:]] == list(PREFILLS)
        assert rows[0].end >= max(start for _, start in (*PREFILLS, *DECODES))
        decodes = [step.decode for step in steps if step.decode]
        assert [(len(each), each[0].start) for each in decodes] == list(DECODES)
        for each in decodes:
            assert len({int(row.pages[-1]) for row in each}) == len(each)
            assert all(len(row.pages) == -(-row.end // page_size) for row in each)
