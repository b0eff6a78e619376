"""Whether a decode worker has room for one more request, its answer's growth included.

As SGLang estimates it: of the tokens that the answers may still grow by, a part is counted, the new
token ratio. It falls with time, for most answers end early, and rises again when a worker had to
retract a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

INITIAL_RATIO = 0.7
# The least ratio is this part of the initial one.
LEAST_PART = 0.14
# From the initial ratio to the least one, in seconds.
FALL_S = 30.0
# An answer's limit above this many tokens is taken for no limit at all.
MAX_GROWTH = 4096


@dataclass(slots=True)
class NewTokenRatio:
    """`conservativeness` (1.0) scales how much growth is counted; at most all of it."""

    conservativeness: float = 1.0
    _value: float = field(init=False)
    _since: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._value = self.initial

    @property
    def initial(self) -> float:
        return min(1.0, INITIAL_RATIO * self.conservativeness)

    @property
    def least(self) -> float:
        return self.initial * LEAST_PART

    def at(self, now: float) -> float:
        fallen = (self.initial - self.least) * max(0.0, now - self._since) / FALL_S
        return max(self.least, self._value - fallen)

    def retracted(self, now: float) -> None:
        """A worker ran out of pages: count half as much again, at least the initial ratio."""
        self._value = min(1.0, max(self.initial, 1.5 * self.at(now)))
        self._since = now


def growth(max_tokens: int) -> int:
    """Tokens that an answer is expected to grow by at most."""
    return min(max_tokens, MAX_GROWTH)
