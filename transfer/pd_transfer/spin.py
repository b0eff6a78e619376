"""Waiting for an answer that is due at any moment: a short look-out, then sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

# What waking an idle core costs, with the cold caches after it. Nobody spins for longer.
LOOK_OUT: Final = 100e-6
# Of a wait that slept: its waking is part of it.
_SOON: Final = 2 * LOOK_OUT
# For so long what was seen of the cores holds.
_GLANCE: Final = 1e-3

_loadavg: Final = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
_CORES: Final = os.cpu_count() or 1


def cores_are_taken() -> bool:
    """Whether more threads want to run than this machine has cores, the caller being one."""
    running = os.pread(_loadavg, 128, 0).split()[3].partition(b"/")[0]
    return int(running) > _CORES


class Spin:
    """One thread's waits for one kind of news.

    It looks out only while that pays: after news that came soon, until they once do not. So a
    thread that is spoken to now and then sleeps at once, and one in a conversation stays awake.
    Where others compute on all cores it sleeps too: it would only be in their way, and, having had
    its share of a core, be waked later than one that has slept.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        taken: Callable[[], bool] = cores_are_taken,
    ) -> None:
        self._clock = clock
        self._pays = False
        self._look_around = taken
        self._taken = False
        self._seen_until = 0.0

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """What `look`, or else `sleep`, has found; both return something false for nothing.

        Args:
            look: does not block, and lets other threads run.
            sleep: until there are news, or for as long as the caller has time.
        """
        start = self._clock()
        if self._pays and not self._crowded(start):
            while not (found := look()):
                if self._clock() - start > LOOK_OUT:
                    self._pays = False
                    return sleep()
            return found
        found = sleep()
        self._pays = bool(found) and self._clock() - start < _SOON
        return found

    def _crowded(self, now: float) -> bool:
        if now >= self._seen_until:
            self._taken = self._look_around()
            self._seen_until = now + _GLANCE
        return self._taken
