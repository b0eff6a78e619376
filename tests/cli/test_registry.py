"""Which clusters run is known from small files that do not outlive their truth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from pd_cluster import operations, registry
from pd_cluster.errors import StartError

URL = "http://127.0.0.1:9"


def test_announced_until_withdrawn() -> None:
    assert registry.find("one") is None
    registry.announce("one", [URL], None)
    found = registry.find("one")
    assert found is not None
    assert (found.cluster_name, found.server.pid, found.url) == ("one", os.getpid(), URL)
    assert found.is_served
    assert registry.find("two") is None
    assert [each.cluster_name for each in registry.find_all()] == ["one"]
    registry.withdraw("one")
    registry.withdraw("one")
    assert registry.find("one") is None


def test_a_reused_process_id_is_another_process(state_dir: Path) -> None:
    registry.announce("one", [URL], None)
    path = state_dir / "one.json"
    known = msgspec.json.decode(path.read_bytes(), type=registry.KnownCluster)
    earlier = registry.Process(known.server.pid, known.server.started - 1)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, server=earlier)))
    found = registry.find("one")
    assert found is not None
    assert not found.is_served


def test_what_a_killed_serve_left_is_found_and_removed() -> None:
    """The processes below a `serve` that is gone are ended by their ids; others are left alone."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    left, other = subprocess.Popen(sleep), subprocess.Popen(sleep)
    try:
        registry.announce("one", [URL], None)
        known = registry.find("one")
        assert known is not None
        gone = registry.Process(known.server.pid, known.server.started - 1)
        process = registry.Process.of(psutil.Process(left.pid))
        orphaned = msgspec.structs.replace(known, server=gone, processes=[process])
        (registry.state_dir() / "one.json").write_bytes(msgspec.json.encode(orphaned))
        with pytest.raises(StartError, match="was killed; 1 of its processes still run"):
            operations.served("one")
        assert "1 processes" in operations.take_down("one", timeout_s=10)
        assert left.poll() is not None
        assert other.poll() is None
        assert registry.find("one") is None
        with pytest.raises(StartError, match="no cluster 'one'"):
            operations.take_down("one", timeout_s=10)
    finally:
        for each in (left, other):
            each.kill()
            each.wait()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_damaged_file_is_no_cluster(state_dir: Path, data: bytes) -> None:
    state_dir.mkdir(parents=True)
    (state_dir / "one.json").write_bytes(data)
    assert registry.find("one") is None
    registry.announce("one", [URL], None)
    assert registry.find("one") is not None


def test_nothing_but_the_file_is_left(state_dir: Path) -> None:
    registry.announce("one", [URL], None)
    assert [path.name for path in state_dir.iterdir()] == ["one.json"]


def test_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PD_CLUSTER_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert registry.state_dir() == tmp_path / "pd-cluster"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.state_dir() == tmp_path / ".local" / "state" / "pd-cluster"
