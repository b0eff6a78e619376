"""What this user's clusters are and where: a small file for each, written by `serve`.

The file outlives a `serve` that was killed, so that `status` can show and `down` can remove what is
left of it: processes by their ids and start times, actors in a shared Ray by its address.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil


class Process(msgspec.Struct, frozen=True):
    """A process; its start (seconds since the epoch) tells it from a later one with the same id."""

    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> Process:
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """The process, while it lives."""
        try:
            found = psutil.Process(self.pid)
            same = found.create_time() == self.started
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


class KnownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that was started; `ray_address` is None where it has a Ray of its own."""

    cluster_name: str
    server: Process
    urls: list[str]
    ray_address: str | None = None
    processes: list[Process] = []

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def is_served(self) -> bool:
        return self.server.find() is not None

    def leftovers(self) -> list[psutil.Process]:
        """Processes of a cluster whose `serve` is gone."""
        found = [process.find() for process in self.processes]
        return [process for process in found if process is not None]


def state_dir() -> Path:
    """PD_CLUSTER_STATE, else pd-cluster in XDG_STATE_HOME, else in ~/.local/state."""
    if own := os.environ.get("PD_CLUSTER_STATE"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pd-cluster"


def log_path(cluster_name: str) -> Path:
    """Where a detached `serve` writes what it would have printed."""
    return state_dir() / f"{cluster_name}.log"


def announce(cluster_name: str, urls: list[str], ray_address: str | None) -> None:
    """Writes down that this process serves a cluster, and the processes below it."""
    me = psutil.Process()
    known = KnownCluster(
        cluster_name=cluster_name,
        server=Process.of(me),
        urls=urls,
        ray_address=ray_address,
        processes=_describe(me.children(recursive=True)),
    )
    path = _path(cluster_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{me.pid}")
    scratch.write_bytes(msgspec.json.encode(known))
    scratch.replace(path)


def withdraw(cluster_name: str) -> None:
    """Forgets a cluster."""
    _path(cluster_name).unlink(missing_ok=True)


def find(cluster_name: str) -> KnownCluster | None:
    """What is known of the cluster of that name, served or left behind; None if nothing."""
    return _read(_path(cluster_name))


def find_all() -> list[KnownCluster]:
    folder = state_dir()
    found = [_read(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return [known for known in found if known is not None]


def _describe(processes: Iterable[psutil.Process]) -> list[Process]:
    described = []
    for process in processes:
        try:
            described.append(Process.of(process))
        except psutil.Error:
            continue  # gone meanwhile
    return described


def _read(path: Path) -> KnownCluster | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KnownCluster)
    except (OSError, msgspec.MsgspecError):
        return None


def _path(cluster_name: str) -> Path:
    return state_dir() / f"{cluster_name}.json"
