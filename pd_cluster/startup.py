"""What the processes and threads that serve do when they begin."""

from __future__ import annotations

import contextlib
import gc
import os

# By how much nicer the threads are that compute: a step takes every core for tens of milliseconds,
# and what others have to do about a token takes one of them.
_AHEAD = 5


def freeze_heap() -> None:
    """Takes all that exists out of garbage collection; for the end of a start-up.

    Modules, tokenizer and model are there for good, and a full collection that walks through them
    holds up every thread of a gateway for 0.1 to 0.3 s. What comes later is collected as ever.
    """
    gc.collect()
    gc.freeze()


def go_ahead() -> None:
    """Has the calling thread, and those that it starts, run before model steps on the same cores.

    Needs CAP_SYS_NICE or RLIMIT_NICE; without, nothing changes.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - _AHEAD)
