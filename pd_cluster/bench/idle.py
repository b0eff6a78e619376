"""What a cluster costs when nobody asks: its processes' time, in percent of one core."""

from __future__ import annotations

import time

import psutil

from pd_cluster.bench.prefix import server


def run(*, seconds: float = 30.0) -> dict[str, float]:
    """`idle.actors_percent` is what our actors and this process take, `idle.ray_percent` what Ray's
    own processes take (they would with any actor), `idle.total_percent` the sum.
    """
    with server(None):
        time.sleep(5)  # what start-up still does in the background
        me = psutil.Process()
        processes = {each.pid: each for each in [me, *me.children(recursive=True)]}
        is_actor = {pid: _is_actor(process) for pid, process in processes.items()}
        before = {pid: _cpu(process) for pid, process in processes.items()}
        started = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - started
        spent = {pid: max(0.0, _cpu(process) - before[pid]) for pid, process in processes.items()}
    ours = sum(value for pid, value in spent.items() if pid == me.pid or is_actor[pid])
    total = sum(spent.values())
    return {
        "idle.actors_percent": ours / elapsed * 100,
        "idle.ray_percent": (total - ours) / elapsed * 100,
        "idle.total_percent": total / elapsed * 100,
    }


def _is_actor(process: psutil.Process) -> bool:
    """Whether it is one of ours: Ray names a process by the actor in it."""
    try:
        return "Actor" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _cpu(process: psutil.Process) -> float:
    """Seconds of processor time so far; 0 for what has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
