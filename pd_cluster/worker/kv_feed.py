"""Tells the coordinator what this worker's cache holds, and how long its steps take.

Updates are numbered; if the coordinator has missed one, or is a new one, it says so and gets a
snapshot. All methods run in the worker's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_cluster.cache.events import CacheEvent
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.coordinator.costs import DecodeMeasured, Measured, PrefillMeasured
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.wire import encode_update
from pd_cluster.types import WorkerId
from pd_cluster.worker.instructions import Batch

# Between two updates, in seconds: a placement may know that much less than the workers do.
INTERVAL_S = 0.05


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

    def take(self, events: Sequence[CacheEvent]) -> None:
        """What `take_events` of the cache gave."""
        self._events += events

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

    @property
    def pending(self) -> bool:
        return bool(self._events or self._measured)

    def flush(self, now: float) -> None:
        """Sends what there is, unless the last time was just now."""
        if now - self._sent_at < INTERVAL_S or not self.pending:
            return
        self._sent_at = now
        update = KvUpdate(self._worker, self._next, tuple(self._events))
        self._next += len(self._events)
        data = encode_update(update, self._measured)
        self._events, self._measured = [], []
        self._send(data)

    def resend(self) -> None:
        """The coordinator lacks something: tells it all that is held now."""
        self._events = []
        snapshot = tuple(self._cache.snapshot())
        self._send(encode_update(KvUpdate(self._worker, self._next, snapshot, snapshot=True)))
