"""Tells the coordinator what this worker's cache holds, and how long its steps take.

Updates are numbered; if the coordinator has missed one, or is a new one, it says so and gets a
snapshot. All methods run in the worker's own thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pd_cluster.cache.events import CacheEvent
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.coordinator.costs import (
    DecodeMeasured,
    LinkMeasured,
    Measured,
    PrefillMeasured,
    TierMeasured,
)
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.wire import encode_update
from pd_cluster.types import WorkerId
from pd_cluster.worker.instructions import Batch

# Between two updates, in seconds: a placement may know that much less than the workers do. How long
# steps take changes slowly, so that alone is told more seldom.
INTERVAL_S = 0.05
# Updates whose time is kept while the coordinator does not answer: the oldest ones say enough.
MAX_UNCONFIRMED = 1000
MEASURES_INTERVAL_S = 1.0


class KvFeed:
    """Collects what has changed, and sends it by `send(data)` every now and then."""

    def __init__(self, worker: WorkerId, cache: PrefixCache, send: Callable[[bytes], None]) -> None:
        self._worker = worker
        self._cache = cache
        self._send = send
        self._events: list[CacheEvent] = []
        self._measured: list[Measured] = []
        self._next = 0
        self._sent_at = float("-inf")
        self.updates = 0  # sent so far
        self._snapshot = 0  # the number of the last one that told everything
        # (number of the update that tells of it, time) of changes that nobody has confirmed.
        self._unconfirmed: deque[tuple[int, float]] = deque()

    def take(self, events: Sequence[CacheEvent], now: float) -> None:
        """What `take_events` of the cache gave."""
        if events and not self._events and len(self._unconfirmed) < MAX_UNCONFIRMED:
            self._unconfirmed.append((self.updates + 1, now))
        self._events += events
        if isinstance(self._cache, TieredCache):
            self._measured += [TierMeasured(*read) for read in self._cache.take_reads()]

    def confirmed(self, number: int) -> None:
        """The coordinator's index has all up to that update."""
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            self._unconfirmed.popleft()

    def lag_s(self, now: float) -> float:
        """How old the oldest change is of which the coordinator's index may not know."""
        return now - self._unconfirmed[0][1] if self._unconfirmed else 0.0

    def measure(self, batch: Batch, seconds: float) -> None:
        """A step that did one kind of work tells what that costs; a mixed one does not."""
        if batch.decode and not batch.prefill:
            tokens = sum(row.end for row in batch.decode)
            self._measured.append(DecodeMeasured(len(batch.decode), tokens, seconds))
        elif batch.prefill and not batch.decode:
            tokens = sum(len(row.tokens) for row in batch.prefill)
            attended = sum(
                len(row.tokens) * (row.start + len(row.tokens) / 2) for row in batch.prefill
            )
            self._measured.append(PrefillMeasured(tokens, attended, seconds))

    def written(self, writes: Iterable[tuple[WorkerId, int, float]]) -> None:
        """Writes to peers, (peer, pages, seconds) each."""
        size = self._cache.page_size
        self._measured += [
            LinkMeasured(peer, pages * size, seconds) for peer, pages, seconds in writes
        ]

    @property
    def pending(self) -> bool:
        return bool(self._events or self._measured)

    def flush(self, now: float) -> None:
        """Sends what there is, unless the last time was just now."""
        interval = INTERVAL_S if self._events else MEASURES_INTERVAL_S
        if now - self._sent_at < interval or not self.pending:
            return
        self._sent_at = now
        update = KvUpdate(self._worker, self._next, tuple(self._events))
        self._next += len(self._events)
        data = encode_update(update, self._measured)
        self._events, self._measured = [], []
        self.updates += 1
        self._send(data)

    def refused(self, number: int) -> None:
        """The coordinator lacks what came before that update: tells it all that is held now, unless
        that has been sent since.
        """
        if number < self._snapshot:
            return
        self._events = []
        snapshot = tuple(self._cache.snapshot())
        self.updates += 1
        self._snapshot = self.updates
        self._send(encode_update(KvUpdate(self._worker, self._next, snapshot, snapshot=True)))
