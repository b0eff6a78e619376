"""Timing for parts that know no clock: the shell around them gives them one of these."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pd_cluster.observability.snapshots import Histogram


@contextmanager
def timed(histogram: Histogram) -> Iterator[None]:
    """Observes how long the block takes, in seconds."""
    started = time.perf_counter()
    yield
    histogram.observe(time.perf_counter() - started)
