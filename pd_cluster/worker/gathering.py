"""Whether an idle worker's next step waits a moment for prompts that come together.

A step costs something in itself, and who comes just after it began waits for its end. So where the
last prompts to find the worker idle were soon followed by others, the next ones wait for as many:

    first arrival ──────────┬── gap ──┬───────────────────────┐
                    others arrive     nobody came: begin      window: begin

Who always comes alone never waits.
"""

from __future__ import annotations

# Of the time that a step takes: who came first waits for no more.
WINDOW = 0.25
# Nobody else is waited for when this long nobody has come (seconds).
GAP_S = 0.01


class Gathering:
    """All times are seconds of one clock."""

    def __init__(self) -> None:
        self._step_s = 0.0  # what the last step of prompts that had waited took
        self._company = 1  # prompts that came within the window, the last time
        self._first: float | None = None  # when the first of those came that wait now, or last did
        self._last = 0.0
        self._count = 0

    def arrived(self, now: float, *, idle: bool) -> None:
        """A prompt has come; `idle` says that the worker had nothing to compute."""
        if idle:
            self._company = max(1, self._count)
            self._first, self._count = now, 0
        if self._first is not None and now <= self._first + self.window_s:
            self._count += 1
            self._last = now

    def begin_at(self) -> float:
        """When those that wait now may begin, if nobody else comes."""
        if self._first is None or self._count >= self._company:
            return 0.0
        return min(self._first + self.window_s, self._last + min(GAP_S, self.window_s))

    def ended(self, seconds: float) -> None:
        """A step of prompts that had waited took this long."""
        self._step_s = seconds

    @property
    def window_s(self) -> float:
        return WINDOW * self._step_s
