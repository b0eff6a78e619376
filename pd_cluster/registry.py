"""What this user's clusters are and where: a small file for each that `serve` keeps while it
runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import psutil


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A `serve` process. `started` tells it from a later process with the same id."""

    cluster_name: str
    pid: int
    started: float
    url: str

    @property
    def alive(self) -> bool:
        try:
            return psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False


def state_dir() -> Path:
    """PD_CLUSTER_STATE, else pd-cluster in XDG_STATE_HOME, else in ~/.local/state."""
    if own := os.environ.get("PD_CLUSTER_STATE"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pd-cluster"


def announce(cluster_name: str, url: str) -> None:
    """Writes down that this process serves a cluster."""
    pid = os.getpid()
    started = psutil.Process(pid).create_time()
    running = RunningCluster(cluster_name=cluster_name, pid=pid, started=started, url=url)
    path = _path(cluster_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{pid}")
    scratch.write_bytes(msgspec.json.encode(running))
    scratch.replace(path)


def withdraw(cluster_name: str) -> None:
    """Forgets a cluster."""
    _path(cluster_name).unlink(missing_ok=True)


def find(cluster_name: str) -> RunningCluster | None:
    """The cluster of that name, if its `serve` still runs; a stale file is removed."""
    try:
        running = msgspec.json.decode(_path(cluster_name).read_bytes(), type=RunningCluster)
    except (OSError, msgspec.MsgspecError):
        return None
    if running.alive:
        return running
    withdraw(cluster_name)
    return None


def _path(cluster_name: str) -> Path:
    return state_dir() / f"{cluster_name}.json"
