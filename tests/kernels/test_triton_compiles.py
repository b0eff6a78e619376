"""Triton's kernels compile for a GPU: what the interpreter runs need not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

# What a block can have on compute capability 9.0.
SHARED_BYTES = 227 << 10
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_kernel_compiles_and_fits(dtype: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", dtype],
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    modules = {name.split(".")[-2] for name, _ in compiled}
    sources = (ROOT / "kernels" / "pd_kernels" / "triton_kernels").glob("*.py")
    assert modules == {each.stem for each in sources} - {"__init__", "launch", "softmax"}
    assert any(name.endswith("_merge") for name, _ in compiled)
    assert all(int(shared) <= SHARED_BYTES for _, shared in compiled), done.stdout
