"""Which clusters run is known from small files that do not outlive their truth."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pd_cluster import registry

URL = "http://127.0.0.1:9"


def test_announced_until_withdrawn() -> None:
    assert registry.find("one") is None
    registry.announce("one", URL)
    found = registry.find("one")
    assert found is not None
    assert (found.cluster_name, found.pid, found.url) == ("one", os.getpid(), URL)
    assert registry.find("two") is None
    registry.withdraw("one")
    registry.withdraw("one")
    assert registry.find("one") is None


def test_a_reused_process_id_is_another_process(state_dir: Path) -> None:
    registry.announce("one", URL)
    path = state_dir / "one.json"
    running = msgspec.json.decode(path.read_bytes(), type=registry.RunningCluster)
    path.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(running, started=running.started - 1))
    )
    assert registry.find("one") is None
    assert not path.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_damaged_file_is_no_cluster(state_dir: Path, data: bytes) -> None:
    state_dir.mkdir(parents=True)
    (state_dir / "one.json").write_bytes(data)
    assert registry.find("one") is None
    registry.announce("one", URL)
    assert registry.find("one") is not None


def test_nothing_but_the_file_is_left(state_dir: Path) -> None:
    registry.announce("one", URL)
    assert [path.name for path in state_dir.iterdir()] == ["one.json"]


def test_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PD_CLUSTER_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert registry.state_dir() == tmp_path / "pd-cluster"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.state_dir() == tmp_path / ".local" / "state" / "pd-cluster"
