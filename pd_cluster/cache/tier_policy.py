"""When a tier is worth using: by what was measured."""

from __future__ import annotations

# Storage may take this long before a request goes on without it: SGLang's defaults, in seconds.
PREFETCH_TIMEOUT_BASE_S = 1.0
PREFETCH_TIMEOUT_PER_1024_S = 0.25
# How much one measurement counts against those before it.
_WEIGHT = 0.2


class Rate:
    """A moving average of amounts per second; None before the first measurement."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        now = amount / seconds
        # Averaged as times, not as rates: one that was lucky does not outweigh several slow ones.
        self.per_s = now if self.per_s is None else 1 / (_WEIGHT / now + (1 - _WEIGHT) / self.per_s)


def worth_loading(tokens: int, load_per_s: float | None, compute_per_s: float | None) -> bool:
    """Whether to load that many tokens' KV rather than compute it; rates are in tokens a second.

    What has not been measured is tried.
    """
    if load_per_s is None or compute_per_s is None:
        return True
    return tokens / load_per_s < tokens / compute_per_s


def prefetch_deadline(tokens: int, now: float) -> float:
    """Until when the policy `timeout` waits for that many tokens from storage."""
    return now + PREFETCH_TIMEOUT_BASE_S + PREFETCH_TIMEOUT_PER_1024_S * tokens / 1024
