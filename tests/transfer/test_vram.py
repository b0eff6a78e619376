"""A GPU's memory in transfers: on a GPU where there is one, else on a driver that pretends."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pd_transfer as nixl
from pd_transfer.cuda import device_count
from tests.transfer.node import PAGE, Node, rows

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub" / "libcuda.c"
needs_ucx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"
)


def run_checks(**environment: str) -> None:
    """In a process of its own: UCX looks for CUDA once in a process's life."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--noconftest",
         "-W", "error", "tests/transfer/on_gpu.py"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_ucx
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler for the stub")
def test_on_a_driver_without_a_gpu(tmp_path: Path) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-o", tmp_path / name, f"-Wl,-soname,{name}", STUB,
             "-lpthread"],
            check=True,
        )  # fmt: skip
    run_checks(PD_STUB_GPU=str(tmp_path))


@needs_ucx
@pytest.mark.skipif(not device_count(), reason="there is no GPU here")
def test_on_a_gpu() -> None:
    run_checks()


@needs_ucx
@pytest.mark.skipif(device_count() > 0, reason="there is a GPU here")
def test_without_a_gpu_its_memory_is_refused() -> None:
    with nixl.agent("ucx", name="a") as made:
        assert made.get_plugin_mem_types("UCX") == ["DRAM_SEG"]
        with pytest.raises(nixl.nixlNotFoundError, match="VRAM_SEG"):
            made.register_memory([(4096, 4096, 0, "")], "VRAM")


def test_one_side_of_a_transfer_is_on_one_device() -> None:
    network = nixl.FakeNetwork()
    with (
        nixl.agent("fake", name="a", network=network) as one,
        nixl.agent("fake", name="b", network=network) as other,
    ):
        there = Node(other)
        one.add_remote_agent(there.metadata())
        memory = np.zeros(2 * PAGE, np.uint8)
        table = rows(memory, PAGE)
        table[1, 2] = 1
        one.register_memory(table, "VRAM")
        mine = one.prep_xfer_dlist("", table, "VRAM")
        theirs = one.prep_xfer_dlist("b", [(there.address(), PAGE, 0)], "DRAM")
        with pytest.raises(nixl.nixlInvalidParamError, match="one device"):
            one.make_prepped_xfer("WRITE", mine, [0, 1], theirs, [0, 0])
        assert one.transfer(one.make_prepped_xfer("WRITE", mine, [1], theirs, [0])) == "DONE"
        assert there.content()[:PAGE] == bytes(PAGE)
