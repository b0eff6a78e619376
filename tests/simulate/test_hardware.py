"""The hardware model: what it is told, and that its times are what the formulas say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.simulate.hardware import (
    HARDWARE,
    MODELS,
    Hardware,
    StepTimes,
    load_hardware,
    load_model,
)
from pd_cluster.types import AttemptId
from pd_cluster.worker.instructions import Batch, Row

GIVEN = "memory_bandwidth: 1e11\nmemory: 1e9\nnic_bandwidth: 1e9\n"
NO_TOKENS = np.empty(0, np.int32)


def row(start: int, length: int) -> Row:
    return Row(AttemptId("a", 0), np.zeros(length, np.int32), start, NO_TOKENS, None)


def test_llamas_shape() -> None:
    model = MODELS["llama-3.1-8b"]
    embedding = model.vocab * model.hidden
    assert model.layer_weights + 2 * embedding == pytest.approx(8.03e9, rel=0.001)
    assert model.kv_bytes_per_token == 131_072


def test_a_decode_step_is_bound_by_memory_and_a_chunk_by_flops() -> None:
    times = StepTimes(HARDWARE["h100"], MODELS["llama-3.1-8b"])
    empty = times.step_s(Batch([row(0, 1)], []))
    assert times.step_s(Batch([row(0, 1)] * 64, [])) == pytest.approx(empty, rel=0.01)
    held = times.step_s(Batch([row(100_000, 1)], []))
    assert held - empty == pytest.approx(100_000 * 131_072 / (3.35e12 * 0.8))
    chunk, double = (times.step_s(Batch([], [row(0, n)])) for n in (4096, 8192))
    assert double > 1.9 * chunk
    assert times.step_s(Batch([], [row(8192, 4096)])) > chunk


def test_without_overlap_a_step_computes_after_it_has_read_the_weights() -> None:
    model = MODELS["smollm2-135m"]
    hardware = Hardware(1e11, 7e9, 1e10, 7e9, flops_efficiency=1.0, memory_efficiency=1.0)
    apart = StepTimes(replace(hardware, overlap=0.0), model)
    batch = Batch([row(0, 1)] * 8, [])
    compute = 8 * (apart.token_s + apart.sampled_s)
    assert apart.step_s(batch) == pytest.approx(
        apart.overhead_s + apart.weights_s + compute + 8 * apart.kv_token_s
    )
    assert StepTimes(hardware, model).step_s(batch) == pytest.approx(
        apart.step_s(batch) - min(compute, apart.weights_s)
    )
    assert apart.decode_steps_s(8, 0, 2)[0] == apart.step_s(batch)
    a, b, c = apart.decode_prior()
    assert a + 8 * b + c * 8 == pytest.approx(apart.step_s(batch))


def test_pages_are_what_fits_beside_the_weights() -> None:
    times = StepTimes(HARDWARE["h100"], MODELS["llama-3.1-8b"])
    assert times.pages(512) == 833
    assert times.pages(1) == pytest.approx(512 * 833, rel=0.002)
    assert times.pages(10**9) == 0


def test_priors_are_what_the_steps_take() -> None:
    times = StepTimes(HARDWARE["a100"], MODELS["llama-3.1-8b"])
    a, b, c = times.prefill_prior()
    step = times.step_s(Batch([], [row(1000, 4000)]))
    assert a + b * 4000 + c * 4000 * 3000 == pytest.approx(step, rel=0.01)
    a, b, c = times.decode_prior()
    step = times.step_s(Batch([row(5000, 1)] * 8, []))
    assert a + 8 * b + c * 40_000 == pytest.approx(step, rel=0.01)


def test_hardware_and_models_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("flops: 1e12\nmemory_bandwidth: 1e11\nmemory: 1e9\nnic_bandwidth: 1e9\n")
    assert load_hardware(str(path)) == Hardware(1e12, 1e11, 1e9, 1e9)
    path = tmp_path / "config.json"
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    path.write_text(json.dumps(config))
    model = load_model(str(path))
    assert (model.layers, model.kv_heads, model.head_dim) == (2, 4, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops: 1\nspeed: 2\n", "unknown keys \\['speed'\\]"),
        ("flops: 1\nmemory: 2\n", "missing keys \\['memory_bandwidth', 'nic_bandwidth'\\]"),
        (f"{GIVEN}flops: fast\n", "flops is 'fast', not a number"),
        (f"{GIVEN}flops: 0\n", "flops is 0; must be positive"),
        (f"{GIVEN}flops: 1\noverlap: 2\n", "overlap is 2; from 0 to 1"),
        ("- 1\n", "expected keys and values"),
    ],
)
def test_bad_files_are_errors_that_say_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(path))
    with pytest.raises(ConfigError, match="unknown hardware 'b300'; known: h200"):
        load_hardware("b300")
    with pytest.raises(ConfigError, match="unknown model 'gpt'; known: llama"):
        load_model("gpt")
