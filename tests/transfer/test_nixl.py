"""The contract suite on the upstream wheel, and what of upstream's behaviour we rely on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pd_transfer as nixl

ROOT = Path(__file__).parents[2]
needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None,
    reason="the wheel nixl_cu12 is not installed (the extra `nixl`)",
)


@needs_wheel
def test_the_contract_holds_on_the_wheel() -> None:
    """In a process of its own: the wheel brings another UCX than UCXX."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
         "--confcutdir", "tests/transfer", "tests/transfer/test_contract.py"],
        cwd=ROOT,
        env={**os.environ, "PD_TRANSFER_CONTRACT": "nixl"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


UPSTREAM = r"""
import inspect, os
os.environ["NIXL_LOG_LEVEL"] = "FATAL"
import numpy as np
from nixl_cu12 import _api, _bindings as b
import pd_transfer as ours

# Every public method of theirs is there, with the same parameters first; but for the GPU's.
for name, method in inspect.getmembers(_api.nixl_agent, inspect.isfunction):
    if name.startswith("_") or name.endswith("mem_view"):
        continue
    theirs = list(inspect.signature(method).parameters)
    mine = list(inspect.signature(getattr(ours.nixl_agent, name)).parameters)
    assert mine[: len(theirs)] == theirs, (name, theirs, mine)
for kind in ("nixl_agent", "nixl_agent_config"):
    names = list(inspect.signature(getattr(_api, kind)).parameters)
    assert list(inspect.signature(getattr(ours, kind)).parameters)[: len(names)] == names
for name in dir(b):
    if name.endswith("Error") or name.endswith("List") or name.endswith("_SEG"):
        assert hasattr(ours, name), name
for name in _api.nixl_thread_sync_t.__members__:
    assert name in ours.nixl_thread_sync_t.__members__, name
for name in ("NIXL_IN_PROG", "NIXL_SUCCESS", "NIXL_ERR_NOT_SUPPORTED", "NIXL_ERR_MISMATCH"):
    assert int(getattr(b, name)) == int(ours.nixl_status_t[name]), name

# Where upstream is not as documented, or does what ours refuses.
agent = _api.nixl_agent("a", _api.nixl_agent_config(backends=["UCX"]))
assert agent.get_xfer_descs([(1, 2)], "DRAM") is None
try:
    agent.send_notif("a", b"x", "UCX")
except TypeError:
    pass
else:
    raise AssertionError("send_notif takes its backend now: drop the remark in nixl-api")
try:
    agent.query_memory([(1, 2, 0, "")], "UCX", "DRAM")
except b.nixlNotSupportedError:
    pass
print("frozen")
"""


@needs_wheel
def test_our_api_is_the_wheels() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPSTREAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip().endswith("frozen"), done.stderr


def test_the_wheel_is_never_loaded_beside_ucxx() -> None:
    pytest.importorskip("ucxx")
    with pytest.raises(RuntimeError, match="different processes"):
        nixl.agent("nixl", name="a")
