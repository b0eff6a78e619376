"""Ends that came before what they end, and beginnings that come after it.

Ray does not keep the order of calls to an async actor: one whose arguments are large (over 100 kB,
a prompt of 25,000 tokens) is passed by a small one that was sent after it. So who is told to end
something that it does not know remembers that, and does not begin it when it comes.

And what a broken line hands back is sent again, though it may have been taken, and all of it be
over by then (`mail.py`). Begun once more, an attempt would write into pages that are another's now.
So workers remember those that have ended, too.
"""

from __future__ import annotations

from collections import OrderedDict

from pd_cluster.types import AttemptId

# They are remembered this long (seconds), and at most this many: both far beyond what a call takes.
TOMBSTONE_S = 600.0
MAX_TOMBSTONES = 10_000


class Tombstones:
    """Attempts that are over: those that somebody has not seen begin, or those that somebody must
    not begin again. Ids are never used again.
    """

    def __init__(self) -> None:
        self._since: OrderedDict[AttemptId, float] = OrderedDict()

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._since

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
