"""What a cluster costs when nobody asks: its processes' time, in percent of one core.

Ray's own processes are never quite idle, nor is an actor that does nothing. So a bare Ray with as
many actors that do nothing is measured in the same run: the difference is ours.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import psutil
import ray

from pd_cluster.bench.client import server
from pd_cluster.cluster import init_ray
from pd_cluster.config import load_config

# What start-up still does in the background is over by then (seconds).
SETTLE_S = 5.0


def run(*, seconds: float = 30.0) -> dict[str, float]:
    """`idle.total_percent` is the whole cluster, `idle.bare_ray_percent` a Ray with as many actors
    that do nothing, `idle.added_percent` the difference (aim: under 3).
    """
    config = load_config()
    bare = _bare_ray(1 + config.prefill + config.decode + config.gateways, seconds)
    with server(None):
        total = _measure(seconds)
    return {
        "idle.total_percent": total,
        "idle.bare_ray_percent": bare,
        "idle.added_percent": total - bare,
    }


class _Idle:
    async def ping(self) -> None:
        pass


def _bare_ray(actors: int, seconds: float) -> float:
    temp_dir = tempfile.mkdtemp(prefix="pdb")
    try:
        init_ray(temp_dir=temp_dir)
        remote: Any = ray.remote(num_cpus=0)
        idle = remote(_Idle)
        handles = [idle.remote() for _ in range(actors)]
        ray.get([handle.ping.remote() for handle in handles])
        return _measure(seconds)
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _measure(seconds: float) -> float:
    """Percent of one core that this process and all below it take."""
    time.sleep(SETTLE_S)
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    before = {process.pid: _cpu(process) for process in processes}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - started
    spent = sum(max(0.0, _cpu(process) - before[process.pid]) for process in processes)
    return spent / elapsed * 100


def _cpu(process: psutil.Process) -> float:
    """Seconds of processor time so far; 0 for what has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
