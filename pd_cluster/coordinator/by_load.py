"""Placement policies that know nothing of caches, for comparison."""

from __future__ import annotations

import random
from abc import abstractmethod

import numpy as np

from pd_cluster.coordinator.choice import Ask, Choice, Later, Mask, PlacementPolicy, not_avoided
from pd_cluster.coordinator.costs import Rates
from pd_cluster.coordinator.fleet import Fleet


class ByLoad(PlacementPolicy):
    """Of the simple policies: which slot of a fleet, and an estimate of the work."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    @abstractmethod
    def pick(self, fleet: Fleet, allowed: Mask) -> int: ...

    def choose(
        self, ask: Ask, prefill: Fleet, decode: Fleet, eligible: Mask, now: float
    ) -> Choice | Later:
        return Choice(
            self.pick(prefill, prefill.ready),
            self.pick(decode, not_avoided(eligible, ask)),
            prefill_s=float(self.rates.prefill_s(ask.prompt_len, 0)),
        )


class LeastLoaded(ByLoad):
    """Fewest prompt tokens placed on it, then fewest attempts, then the longest unused."""

    name = "least_loaded"

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        slots = np.flatnonzero(allowed)
        keys = (fleet.last_placement[slots], fleet.attempts[slots], fleet.tokens[slots])
        return int(slots[np.lexsort(keys)[0]])


class RoundRobin(ByLoad):
    """The longest unused."""

    name = "round_robin"

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        slots = np.flatnonzero(allowed)
        return int(slots[fleet.last_placement[slots].argmin()])


class Random(ByLoad):
    name = "random"

    def __init__(self, rates: Rates, seed: int = 0) -> None:
        super().__init__(rates)
        self._rng = random.Random(seed)

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        return int(self._rng.choice(np.flatnonzero(allowed).tolist()))
