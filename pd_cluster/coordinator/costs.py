"""How long things take, in seconds: fitted to what the workers measure, from priors onwards.

    prefill   a + b n + c n (cached + n/2)           n tokens computed after `cached` others
    decode    a + b sequences + c KV tokens          one step
    link      (a + b n) x how this pair's writes stand to all   n tokens' KV written
    tier      a + b n                                n tokens read from host memory, or storage

Each is linear in its coefficients and refitted by least squares of the relative error with
exponential forgetting; the prior keeps a small weight, so that a rate is never undefined: it says
how the coefficients stand to each other, and what is measured says how large they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from pd_cluster.types import WorkerId

Floats = NDArray[np.float64]
# Below a worker's KV pool.
LowerTier = Literal["host", "storage"]

# An observation's weight falls to a half after this many more.
HALF_LIFE = 200.0
# What the prior weighs beside an observation of 1; it is not forgotten.
PRIOR_WEIGHT = 0.04


class FittedTime:
    """seconds ≈ coefficients · features, no coefficient negative."""

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.prior = np.array(prior)
        self._coefficients: Floats | None = self.prior.copy()
        self._forget = 0.5 ** (1 / HALF_LIFE)
        self._normal = np.zeros((len(prior), len(prior)))
        self._target = np.zeros(len(prior))
        # Sums over observations: how many, and what they took by what the prior would have had.
        self._seen = self._size = PRIOR_WEIGHT

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        if seconds <= 0:
            return
        x = np.array(features) / seconds
        self._normal = self._normal * self._forget + np.outer(x, x)
        self._target = self._target * self._forget + x
        self._seen = self._seen * self._forget + 1.0
        self._size = self._size * self._forget + 1.0 / float(x @ self.prior)
        self._coefficients = None  # observed at every step, asked for by a placement

    @property
    def coefficients(self) -> Floats:
        if self._coefficients is None:
            self._coefficients = self._fit()
        return self._coefficients

    def _fit(self) -> Floats:
        """Least squares; what would be negative is held at zero and the others fitted again."""
        scale = self.prior * (self._size / self._seen)
        normal = self._normal * np.outer(scale, scale) + PRIOR_WEIGHT * np.eye(len(scale))
        target = self._target * scale + PRIOR_WEIGHT
        active = np.ones(len(scale), np.bool_)
        fitted = np.zeros(len(scale))
        while active.any():
            fitted[:] = 0.0
            fitted[active] = np.linalg.solve(normal[np.ix_(active, active)], target[active])
            if (fitted >= 0).all():
                break
            active &= fitted > 0
        return np.asarray(fitted * scale, np.float64)


@dataclass(frozen=True, slots=True)
class PrefillMeasured:
    """One step: `tokens` computed, `attended` the sum over them of how many stood before."""

    tokens: int
    attended: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeMeasured:
    """One step of `sequences` sequences that hold `kv_tokens` together."""

    sequences: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A write of `tokens` tokens' KV to `peer`, from its post to its acknowledgement."""

    peer: WorkerId
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierMeasured:
    """A read of `tokens` tokens' KV from a tier, into the one above it."""

    tier: LowerTier
    tokens: int
    seconds: float


Measured = PrefillMeasured | DecodeMeasured | LinkMeasured | TierMeasured


@dataclass(slots=True)
class Priors:
    """What to believe before anything was measured; by default a 100M model on two CPU cores."""

    prefill: tuple[float, float, float] = (5e-3, 1.2e-3, 1e-7)
    decode: tuple[float, float, float] = (20e-3, 3e-3, 1e-7)
    link_latency_s: float = 1e-3
    link_bytes_per_s: float = 2e9
    kv_bytes_per_token: int = 46_080
    # (per read, per token) of each tier.
    host: tuple[float, float] = (1e-3, 1e-5)
    storage: tuple[float, float] = (5e-3, 1e-4)


@dataclass(slots=True)
class Rates:
    """The rates of a cluster of equal workers."""

    priors: Priors = field(default_factory=Priors)
    prefill: FittedTime = field(init=False)
    decode: FittedTime = field(init=False)
    tiers: dict[LowerTier, FittedTime] = field(init=False)
    link: FittedTime = field(init=False)
    # How much longer than a write to anybody one to this peer takes, by writer.
    pairs: dict[WorkerId, dict[WorkerId, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill = FittedTime(self.priors.prefill)
        self.decode = FittedTime(self.priors.decode)
        self.tiers = {
            "host": FittedTime(self.priors.host),
            "storage": FittedTime(self.priors.storage),
        }
        token_s = self.priors.kv_bytes_per_token / self.priors.link_bytes_per_s
        self.link = FittedTime((self.priors.link_latency_s, token_s))

    def observe(self, worker: WorkerId, measured: Measured) -> None:
        match measured:
            case PrefillMeasured():
                features = (1.0, float(measured.tokens), measured.attended)
                self.prefill.observe(features, measured.seconds)
            case DecodeMeasured():
                step = (1.0, float(measured.sequences), float(measured.kv_tokens))
                self.decode.observe(step, measured.seconds)
            case LinkMeasured():
                self._observe_link(worker, measured)
            case TierMeasured():
                read = (1.0, float(measured.tokens))
                self.tiers[measured.tier].observe(read, measured.seconds)

    @overload
    def prefill_s(self, tokens: int, cached: int) -> float: ...
    @overload
    def prefill_s(
        self, tokens: NDArray[np.int64] | Floats, cached: NDArray[np.int64] | Floats
    ) -> Floats: ...

    def prefill_s(
        self, tokens: int | NDArray[np.int64] | Floats, cached: int | NDArray[np.int64] | Floats
    ) -> float | Floats:
        """Time to compute `tokens` after `cached` others."""
        a, b, c = self.prefill.coefficients.tolist()
        seconds: float | Floats = a + tokens * (b + c * (cached + tokens * 0.5))
        return seconds

    @overload
    def step_s(self, sequences: int, kv_tokens: int) -> float: ...
    @overload
    def step_s(self, sequences: NDArray[np.int64], kv_tokens: NDArray[np.int64]) -> Floats: ...

    def step_s(
        self, sequences: int | NDArray[np.int64], kv_tokens: int | NDArray[np.int64]
    ) -> float | Floats:
        a, b, c = self.decode.coefficients.tolist()
        seconds: float | Floats = a + b * sequences + c * kv_tokens
        return seconds

    def read_s(self, tier: LowerTier, tokens: NDArray[np.int64]) -> Floats:
        """Time to read so many tokens' KV from a tier; 0 for none."""
        a, b = self.tiers[tier].coefficients.tolist()
        return np.where(tokens > 0, a + b * tokens, 0.0)

    def transfer_s(self, tokens: NDArray[np.int64], factors: float | Floats = 1.0) -> Floats:
        """Time to move the KV of so many tokens; `factors` are those of the links."""
        a, b = self.link.coefficients.tolist()
        return np.asarray((a + b * tokens) * factors, np.float64)

    def link_factors(self, source: WorkerId, slots: Mapping[WorkerId, int], count: int) -> Floats:
        """From a worker to each of `count` slots: 1 where nothing is known."""
        found = np.ones(count)
        for peer, factor in self.pairs.get(source, {}).items():
            if peer in slots:
                found[slots[peer]] = factor
        return found

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone: its links are measured anew if it comes back."""
        self.pairs.pop(worker, None)
        for peers in self.pairs.values():
            peers.pop(worker, None)

    def _observe_link(self, worker: WorkerId, measured: LinkMeasured) -> None:
        if measured.tokens <= 0 or measured.seconds <= 0:
            return
        self.link.observe((1.0, float(measured.tokens)), measured.seconds)
        factor = measured.seconds / float(self.transfer_s(np.array(measured.tokens)))
        peers = self.pairs.setdefault(worker, {})
        peers[measured.peer] = 0.9 * peers.get(measured.peer, factor) + 0.1 * factor
