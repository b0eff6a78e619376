from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from pd_cluster.errors import StartError
from pd_cluster.worker import transfer_agent


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_ucxx(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "ucxx" else None

    monkeypatch.setattr("importlib.util.find_spec", only_ucxx)
    transfer_agent.require_backend("ucx")
    with pytest.raises(StartError, match="package nixl-cu12"):
        transfer_agent.make_transfer_agent("nixl", "a", b"s", "127.0.0.1", {})


def test_the_wheel_is_not_joined_by_ucxx() -> None:
    """A worker imports this module whatever the backend; a process holds one UCX."""
    code = "import sys, pd_cluster.worker.transfer_agent; print('ucxx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
