"""What processes have counted over all their lives, so that a restart sets no counter back."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pd_cluster.observability.snapshots import (
    GatewaySnapshot,
    WorkerSnapshot,
    with_counters_of,
)

S = TypeVar("S", WorkerSnapshot, GatewaySnapshot)

# Lives of one name that are remembered as over: a snapshot of theirs may still be on its way.
ENDED_LIVES = 8


@dataclass(slots=True)
class _Lives(Generic[S]):
    latest: S
    before: S | None = None  # the sum of the lives that are over
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=ENDED_LIVES))


class Ledger(Generic[S]):
    """The last snapshot of each name, and what its earlier lives had counted by their last ones.

    Names are those of actors: as many as there have ever been at a time. May be used from any
    thread.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Lives[S]] = {}
        self._lock = threading.Lock()

    def observe(self, snapshot: S) -> None:
        """Takes a snapshot in; one that is older than what is known changes nothing."""
        name, incarnation = snapshot.worker.name, snapshot.worker.incarnation
        with self._lock:
            lives = self._lives.get(name)
            if lives is None:
                self._lives[name] = _Lives(snapshot)
            elif lives.latest.worker == snapshot.worker:
                if snapshot.number > lives.latest.number:
                    lives.latest = snapshot
            elif incarnation not in lives.ended:
                lives.ended.append(lives.latest.worker.incarnation)
                lives.before = _total(lives)
                lives.latest = snapshot

    def totals(self) -> list[S]:
        """For each name its last snapshot, with the counters of all its lives."""
        with self._lock:
            return [_total(lives) for lives in self._lives.values()]


def _total(lives: _Lives[S]) -> S:
    return lives.latest if lives.before is None else with_counters_of(lives.before, lives.latest)
