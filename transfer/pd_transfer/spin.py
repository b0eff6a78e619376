"""Waiting for an answer that is due at any moment: a short look-out, then sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

# What waking an idle core costs, with the cold caches after it. Nobody spins for longer.
LOOK_OUT: Final = 100e-6
# Of a wait that slept: its waking is part of it.
_SOON: Final = 2 * LOOK_OUT


class Spin:
    """One thread's waits for one kind of news.

    It looks out only while that pays: after news that came soon, until they once do not. So a
    thread that is spoken to now and then sleeps at once, and one in a conversation stays awake.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pays = False

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """What `look`, or else `sleep`, has found; both return something false for nothing.

        Args:
            look: does not block, and lets other threads run.
            sleep: until there are news, or for as long as the caller has time.
        """
        start = self._clock()
        if self._pays:
            while not (found := look()):
                if self._clock() - start > LOOK_OUT:
                    self._pays = False
                    return sleep()
            return found
        found = sleep()
        self._pays = bool(found) and self._clock() - start < _SOON
        return found
