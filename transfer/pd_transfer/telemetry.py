"""What is known of a transfer's times: for the one that ended, and as a guess for the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CostMethod = Literal["ANALYTICAL_BACKEND", "UNKNOWN"]

_MICRO: Final = 1e6
_WEIGHT: Final = 0.2


@dataclass(frozen=True)
class nixlXferTelemetry:
    """Times in microseconds, as upstream: `startTime` on the monotonic clock, `postDuration` of
    the call of `transfer`, `xferDuration` from there to the end. `descCount` after merging."""

    startTime: int
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int


class CostModel:
    """Learns seconds = latency + bytes / rate of one peer from what its transfers took."""

    def __init__(self) -> None:
        self._latency = 0.0
        self._per_byte = 0.0
        self._error = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        if not self._latency:
            self._latency, self._per_byte = seconds / 2, seconds / 2 / max(nbytes, 1)
            self._error = seconds / 2
            return
        expected = self._latency + nbytes * self._per_byte
        self._error += _WEIGHT * (abs(seconds - expected) - self._error)
        # The part that dominates the guess is the part that was wrong.
        scale = 1 + _WEIGHT * (min(max(seconds / expected, 0.1), 10.0) - 1)
        share = nbytes * self._per_byte / expected
        self._per_byte *= 1 + share * (scale - 1)
        self._latency *= 1 + (1 - share) * (scale - 1)

    def estimate(self, nbytes: int) -> tuple[int, int, CostMethod]:
        """Duration and error margin, us. "UNKNOWN" (0, 0) before anything has been learned."""
        if not self._latency:
            return 0, 0, "UNKNOWN"
        seconds = self._latency + nbytes * self._per_byte
        return (
            max(1, round(seconds * _MICRO)),
            max(1, round(self._error * _MICRO)),
            "ANALYTICAL_BACKEND",
        )
