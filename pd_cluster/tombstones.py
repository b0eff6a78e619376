"""Ends that came before what they end.

Ray does not keep the order of calls to an async actor: one whose arguments are large (over 100 kB,
a prompt of 25,000 tokens) is passed by a small one that was sent after it. So who is told to end
something that it does not know remembers that, and does not begin it when it comes.
"""

from __future__ import annotations

from collections import OrderedDict

from pd_cluster.types import AttemptId

# They are remembered this long (seconds), and at most this many: both far beyond what a call takes.
TOMBSTONE_S = 600.0
MAX_TOMBSTONES = 10_000


class Tombstones:
    """Attempts that are over for somebody who has not seen them begin. Ids are never used again."""

    def __init__(self) -> None:
        self._since: OrderedDict[AttemptId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, attempt: AttemptId, now: float) -> None:
        self._since.setdefault(attempt, now)
        if len(self._since) > MAX_TOMBSTONES:
            self._since.popitem(last=False)

    def take(self, attempt: AttemptId) -> bool:
        """Whether the attempt, which begins now, is over already; it is asked for once."""
        return self._since.pop(attempt, None) is not None

    def expire(self, now: float) -> None:
        while self._since and now - next(iter(self._since.values())) >= TOMBSTONE_S:
            self._since.popitem(last=False)
