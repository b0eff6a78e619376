"""The hit rate of a cache over the last minute, from counters that are looked at now and then."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0


class HitRate:
    """`rate` covers the last minute in which there were queries: an idle cache keeps its figure."""

    def __init__(self) -> None:
        # (time, queries, hits); the first one is the base that the rate is counted from.
        self._samples: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)])
        self.rate = 0.0

    def observe(self, now: float, queries: int, hits: int) -> None:
        """Counters at `now` (seconds, monotonic)."""
        self._samples.append((now, queries, hits))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        _, base_queries, base_hits = self._samples[0]
        if queries > base_queries:
            self.rate = (hits - base_hits) / (queries - base_queries)
