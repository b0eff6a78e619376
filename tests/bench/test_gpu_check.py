"""The check of the GPU path runs whole on the CPU, and says what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pd_cluster.bench.gpu_check import __main__ as gpu_check
from pd_cluster.bench.gpu_check.results import Result, figures

ROOT = Path(__file__).parent.parent.parent
# What the machine that it is for need not have.
MISSING = ("flashinfer", "msgspec", "pydantic", "ray", "safetensors", "transformers", "ucxx")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU it takes minutes: run scripts/gpu_check itself"
)


def test_all_parts_pass_on_the_cpu_with_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--json", tmp_path / "figures.json"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flat = json.loads((tmp_path / "figures.json").read_text())
    checks = {name: value for name, value in flat.items() if name.startswith("gpu.check.")}
    assert all(value is True for value in checks.values())
    for name in (
        "kernels.fused_add_rms_norm.triton.bfloat16",
        "kernels.page_scatter.triton.page_first.ps16.bfloat16",
        "kernels.decode_attention.triton.page_first.ps1.float32",
        "kernels.prefill_attention.triton.layer_first.ps4.bfloat16",
        "kernels.filter_probabilities.triton.float32",
        "kernels.step.triton.page_first.ps1.mixed.bfloat16",
        "kernels.step.triton.layer_first.ps4.captured.float32",
        "model.layer_first.ps16.graphs.float32",
        "transfer.page_first",
        "transfer.layer_first",
    ):
        assert f"gpu.check.{name}" in checks
    for name in (
        "decode_attention.ps16_share",
        "decode_attention.triton.ps1_share",
        "decode_step_share",
        "gather.ps1_share",
        "prefill_share",
        "scatter.ps16_share",
    ):
        assert flat[f"gpu.{name}"] > 0
    assert "no GPU" in flat["gpu.skipped.measures"]
    assert flat["gpu.found.flashinfer"] == "none (no flashinfer here)"
    assert "no msgspec here" in flat["gpu.skipped.transfer.ucx"]


def test_pages_move_by_the_transfer_library_where_it_is(tmp_path: Path) -> None:
    for module in ("triton", "ucxx"):
        pytest.importorskip(module)
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--part", "transfer", "--json", tmp_path / "figures.json"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flat = json.loads((tmp_path / "figures.json").read_text())
    assert flat["gpu.check.transfer.ucx.page_first"] is True
    assert flat["gpu.transfer.ucx.write_gbps"] > 0
    assert flat["gpu.found.ucxx"]


def test_a_part_that_takes_too_long_or_dies_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PARTS, "kernels", 0)
    [late] = gpu_check._part("kernels")[1]
    assert (late.name, late.status) == ("kernels", "FAILED")
    assert "not over after 0 s" in late.detail
    monkeypatch.setattr(sys, "executable", "/bin/false")
    [dead] = gpu_check._part("model")[1]
    assert "ended with status 1" in dead.detail


def test_parts_end_within_eight_minutes() -> None:
    assert sum(gpu_check.PARTS.values()) < 8 * 60


def test_results_become_one_flat_object() -> None:
    results = [
        Result("a", "ok"),
        Result("b", "FAILED", detail="off by 1"),
        Result("c", "measured", 0.5, "of it"),
        Result("d", "skipped", detail="no GPU"),
    ]
    assert figures(results) == {
        "gpu.check.a": True,
        "gpu.check.b": False,
        "gpu.c": 0.5,
        "gpu.skipped.d": "no GPU",
    }
