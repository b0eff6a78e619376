"""The workers of one role and their load, as arrays by slot: placement looks at all at once.

Load is counted at dispatch: `busy_until` is when a prefill worker will have computed what was given
to it, `tokens` the KV that a decode worker holds for what was placed on it. `recent` is the work of
the last minutes, which says whom to give the next cold prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.holders import Stores
from pd_cluster.coordinator.index import PrefixIndex
from pd_cluster.types import WorkerId

# Time constant of `recent`, in seconds.
RECENT_S = 600.0

_FLOATS = ("busy_until", "pledged", "recent", "landing_until")
_INTS = ("attempts", "tokens", "growth", "unclaimed", "available", "capacity", "last_placement")
_FLAGS = ("ready", "full")


class Fleet:
    def __init__(self, page_size: int, stores: Stores | None = None) -> None:
        self.index = PrefixIndex(page_size, stores=stores)
        self.slots: dict[WorkerId, int] = {}
        self.workers: list[WorkerId | None] = []
        self.busy_until = np.zeros(0)
        self.pledged = np.zeros(0)  # seconds of work of waiting requests that chose this worker
        self.recent = np.zeros(0)  # seconds of work, decaying
        self.landing_until = np.zeros(0)  # when all prompts on their way to it should be there
        self.attempts = np.zeros(0, np.int64)
        self.tokens = np.zeros(0, np.int64)
        self.growth = np.zeros(0, np.int64)  # tokens that answers may grow by
        self.unclaimed = np.zeros(0, np.int64)  # tokens to be held that no report includes yet
        self.available = np.zeros(0, np.int64)  # tokens free or evictable, as reported
        self.capacity = np.zeros(0, np.int64)
        self.last_placement = np.zeros(0, np.int64)
        self.ready = np.zeros(0, np.bool_)
        self.full = np.zeros(0, np.bool_)
        self._recent_at = 0.0

    def __len__(self) -> int:
        return len(self.workers)

    def join(self, worker: WorkerId, capacity: int, store: str = "") -> int:
        """Gives the worker a slot, with no load and nothing held; `store` is below it."""
        if None in self.workers:
            slot = self.workers.index(None)
        else:
            slot = len(self.workers)
            self.workers.append(None)
            for name in (*_FLOATS, *_INTS, *_FLAGS):
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.zeros(1, array.dtype)))
        self.workers[slot] = worker
        self.slots[worker] = slot
        self.capacity[slot] = self.available[slot] = capacity
        self.ready[slot] = True
        self.index.join(worker, slot, store)
        # As loaded as the others on average, so that a newcomer is not given every cold prompt.
        others = self.ready.copy()
        others[slot] = False
        self.recent[slot] = self.recent[others].mean() if others.any() else 0.0
        return slot

    def leave(self, worker: WorkerId) -> None:
        slot = self.slots.pop(worker)
        self.workers[slot] = None
        self.index.leave(worker)
        for name in (*_FLOATS, *_INTS, *_FLAGS):
            getattr(self, name)[slot] = 0

    def worker(self, slot: int) -> WorkerId:
        worker = self.workers[slot]
        assert worker is not None
        return worker

    def queue_s(self, now: float) -> NDArray[np.float64]:
        """Seconds of work that each has before it, that of waiting requests included."""
        backlog: NDArray[np.float64] = np.maximum(0.0, self.busy_until - now) + self.pledged
        return backlog

    def excess(self, now: float) -> NDArray[np.float64]:
        """Recent work above the mean of those that are ready, in seconds."""
        if now > self._recent_at:
            self.recent *= np.exp((self._recent_at - now) / RECENT_S)
            self._recent_at = now
        mean = self.recent[self.ready].mean() if self.ready.any() else 0.0
        excess: NDArray[np.float64] = self.recent - mean
        return excess

    def add_work(self, slot: int, seconds: float, now: float) -> tuple[float, float]:
        """Counts work at dispatch. Returns when it will be computed: (start, finish)."""
        start = max(now, float(self.busy_until[slot]))
        self.busy_until[slot] = start + seconds
        self.recent[slot] += seconds
        return start, start + seconds

    def remove_work(self, slot: int, start: float, finish: float, now: float) -> None:
        """Takes back what is not yet done of work that will not be."""
        left = finish - max(now, start)
        if left > 0:
            self.busy_until[slot] -= min(left, max(0.0, float(self.busy_until[slot]) - now))
            self.recent[slot] -= left
