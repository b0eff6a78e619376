"""What one placement costs the coordinator, by the number of workers."""

from __future__ import annotations

import time

from pd_cluster.simulate.placing import placement_seconds

WORKERS = (10, 100, 1000)


def run() -> dict[str, float]:
    """`placement.<n>.p50_us` and `p99_us`: one `place` of the cost policy, its request's hashes
    unpacked and queued, with `n` prefill and `n` decode workers; time of the thread, so that a busy
    machine matters little. `placement.growth_ratio`: the median with 1,000 by that with 10.
    """
    found = placement_seconds(time.thread_time, WORKERS)
    figures = {f"{name.removesuffix('_s')}_us": seconds * 1e6 for name, seconds in found.items()}
    growth = figures[f"placement.{WORKERS[-1]}.p50_us"] / figures[f"placement.{WORKERS[0]}.p50_us"]
    return figures | {"placement.growth_ratio": growth}
