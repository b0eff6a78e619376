"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """`now` is in seconds. What is due at one time happens in the order in which it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._asked = 0

    def at(self, time: float, action: Action) -> None:
        self._asked += 1
        heapq.heappush(self._due, (max(time, self.now), self._asked, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Does the next; False if there is nothing left to do."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True
