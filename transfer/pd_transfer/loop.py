"""The agent's own thread: sleeps in epoll, wakes for sockets, UCX workers, timers and calls."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from pd_transfer.spin import Spin

logger: Final = logging.getLogger("pd_transfer")

# By how much nicer the others are. A page is moved in microseconds and somebody waits for it; while
# cores were shared fairly with a model's step, which takes them all, pages moved at half the speed.
_AHEAD: Final = 10


class Progressable(Protocol):
    def progress(self) -> bool:
        """Do some work; True once there is nothing left and the descriptor will tell of more."""


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """All of it but `call`, `stop` and `is_current` belongs to who holds `turn`.

    That is the thread itself, but while it sleeps. Another thread that waits for what this one
    would wake it for may do that work in its place, which saves a waking (`Connection.take_here`).
    """

    def __init__(self, name: str) -> None:
        self.turn = threading.RLock()
        self._calls: deque[Callable[[], None]] = deque()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Callable[[], None]] = {self._wake: self._woken}
        self._epoll.register(self._wake, select.EPOLLIN)
        self._busy: dict[Progressable, None] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], None]) -> bool:
        """Have the thread call it soon. False: it has stopped and will not."""
        with self._lock:
            if self._stopping:
                return False
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)
        return True

    def stop(self, last: Callable[[], None]) -> None:
        """Call `last` after all earlier calls, then end the thread. Waits for it."""
        with self._lock:
            if not self._stopping:
                self._calls.append(last)
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        if not self.is_current():
            self._thread.join()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def interest(self, fd: int, *, readable: bool = True, writable: bool = False) -> None:
        """What the handler is to be told of; of the connection's end always."""
        events = (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0)
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def busy(self, what: Progressable) -> None:
        """Call its `progress` until that is True."""
        self._busy[what] = None

    def idle(self, what: Progressable) -> None:
        self._busy.pop(what, None)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def stand_in(self, function: Callable[[], None]) -> None:
        """With the turn, from another thread: do this as the thread would."""
        self._guarded(function)
        if self._busy and not self._stopping:
            os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _run(self) -> None:
        ready: list[tuple[int, int]] = []
        poll, spin = self._epoll.poll, Spin()
        with contextlib.suppress(OSError):  # it needs CAP_SYS_NICE or RLIMIT_NICE
            nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, 0, nice - _AHEAD)
        try:
            while True:
                with self.turn:
                    self._handle(ready)
                    if self._stopping and not self._calls:
                        return
                    timeout = self._work()
                # Only what has just been served is soon followed by more.
                if ready and timeout != 0:
                    ready = spin.wait(lambda: poll(0), partial(poll, timeout))
                else:
                    ready = poll(timeout)
        finally:
            with self._lock:
                self._stopping = True
                os.close(self._wake)
            self._epoll.close()

    def _work(self) -> float | None:
        """What needs no descriptor to be ready. Returns how long to sleep then."""
        while self._calls:
            self._guarded(self._calls.popleft())
        for what in list(self._busy):
            if what in self._busy:
                self._guarded(partial(self._progress, what))
        return self._timeout()

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        for fd, _ in ready:
            handler = self._handlers.get(fd)
            # An earlier handler of this round may have closed it.
            if handler is not None:
                self._guarded(handler)
        while self._timers and self._timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._guarded(timer.call)

    def _progress(self, what: Progressable) -> None:
        self.idle(what)  # where it fails, it is not tried again
        if not what.progress():
            self.busy(what)

    def _timeout(self) -> float | None:
        if self._busy or self._calls or self._stopping:
            return 0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._timers:
            return max(0.0, self._timers[0][0] - time.monotonic())
        return None

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            # A defect in one connection's handling must not end the others'.
            logger.exception("a defect in the transfer thread")
