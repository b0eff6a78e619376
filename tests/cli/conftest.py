"""The command line in this process, with a state folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_cluster import cli
from tests.model.tiny import save_tiny


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that stderr has."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("PD_CLUSTER_STATE", str(folder))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `pd-cluster` with these arguments, which must end by itself."""

    def run(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pd-cluster", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder whose config and weights fit together, in several shards."""
    folder = tmp_path / "tiny"
    save_tiny(folder, shard_size="100KB")
    return folder
