"""Which prefill and which decode worker serve a request, and by which route: a cost in seconds.

    prefill p    queue_weight x queue(p) + compute(prompt - held by p) + balance x excess work(p)
    decode d     load(d) + transfer(prompt - held by d) + queue_weight x wait(d)
                 + balance x excess work(d)
    remote         prefill(p) + decode(d)
    remote+pull    the same, but p reads from d what only d holds: computes less, moves less again
    local          no p: d computes a short tail between its steps, within the ITL limit

`docs/placement.md` says where the weights come from. Everything is looked at for all workers at
once, as arrays by slot.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.costs import Floats, Rates
from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.coordinator.index import Lengths
from pd_cluster.types import Route, WorkerId

Mask = NDArray[np.bool_]

# Candidates of each side whose terms are kept as the reasons of a placement.
EXPLAINED = 8
# Decode workers, those that hold most, for which the routes by way of their cache are weighed.
WEIGHED = 8


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of each kind counts beside a second of computing.

    Queueing counts less than its length, for waiting delays one request, once, while computing
    what another worker holds costs the cluster capacity and cache; `balance` keeps the work of the
    last minutes even, and with it the ages at which caches evict.
    """

    queue: float = 0.1
    balance: float = 0.01
    decode_balance: float = 0.01
    # What a decode step takes above an empty one counts for this many tokens of the answer, times
    # its ratio to the empty step to the power of `itl_power`: the tail is what hurts.
    itl_tokens: float = 300.0
    itl_power: float = 5.0
    # No request is bound to a prefill worker that has more than this to do (seconds).
    bind_ahead_s: float = 0.25


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Which routes beside `remote` the workers can do, and how far `local` may go."""

    pull: bool = False
    local: bool = False
    # Running streams' inter-token time must stay under this, and a tail under this many steps.
    itl_limit_s: float = 0.05
    local_max_steps: int = 4
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed. `avoid`: decode slots to be taken only if there is no other."""

    prompt_len: int
    max_tokens: int
    hashes: Sequence[int] = ()
    avoid: frozenset[int] = frozenset()
    # Its own pledge: (slot, seconds) counted in `Fleet.pledged`, not to be queued behind.
    pledge: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One candidate's cost and what it is made of, in seconds; `held` in tokens."""

    slot: int
    cost: float
    held: int
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` is a slot also for `local`: the worker that serves if decode then refuses."""

    prefill: int
    decode: int
    route: Route = "remote"
    prefill_s: float = 0.0  # work given to the prefill worker
    decode_s: float = 0.0  # work given to the decode worker: what it receives, or computes
    prefill_held: int = 0
    decode_held: int = 0
    reasons: dict[str, list[Term]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Later:
    """The best prefill worker has enough to do until `until`; ask again then."""

    prefill: int
    prefill_s: float
    until: float


class PlacementPolicy(ABC):
    """Chooses among ready prefill workers and the decode workers in `eligible` (both not empty)."""

    name: str
    limits = RouteLimits()  # set anew when workers come and go

    @abstractmethod
    def choose(
        self,
        ask: Ask,
        prefill: Fleet,
        decode: Fleet,
        eligible: Mask,
        now: float,
    ) -> Choice | Later: ...


class _ByLoad(PlacementPolicy):
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
            self.pick(decode, _not_avoided(eligible, ask)),
            prefill_s=float(self.rates.prefill_s(ask.prompt_len, 0)),
        )


class LeastLoaded(_ByLoad):
    """Fewest prompt tokens placed on it, then fewest attempts, then the longest unused."""

    name = "least_loaded"

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        slots = np.flatnonzero(allowed)
        keys = (fleet.last_placement[slots], fleet.attempts[slots], fleet.tokens[slots])
        return int(slots[np.lexsort(keys)[0]])


class RoundRobin(_ByLoad):
    """The longest unused."""

    name = "round_robin"

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        slots = np.flatnonzero(allowed)
        return int(slots[fleet.last_placement[slots].argmin()])


class Random(_ByLoad):
    name = "random"

    def __init__(self, rates: Rates, seed: int = 0) -> None:
        super().__init__(rates)
        self._rng = random.Random(seed)

    def pick(self, fleet: Fleet, allowed: Mask) -> int:
        return int(self._rng.choice(np.flatnonzero(allowed).tolist()))


class PrefixPrefillOnly(PlacementPolicy):
    """The cost of the prefill side, and the least loaded decode worker whatever it holds."""

    name = "prefix_prefill_only"

    def __init__(self, rates: Rates, weights: Weights) -> None:
        self._cost = Cost(rates, weights)
        self._load = LeastLoaded(rates)

    def choose(
        self, ask: Ask, prefill: Fleet, decode: Fleet, eligible: Mask, now: float
    ) -> Choice | Later:
        slot, held, seconds, later, reasons = self._cost.choose_prefill(ask, prefill, now)
        if later:
            return later
        target = self._load.pick(decode, _not_avoided(eligible, ask))
        return Choice(
            slot, target, prefill_s=seconds, prefill_held=held, reasons={"prefill": reasons}
        )


class Cost(PlacementPolicy):
    """Both sides' caches, queues and links, and all routes."""

    name = "cost"

    def __init__(self, rates: Rates, weights: Weights) -> None:
        self.rates = rates
        self.weights = weights

    def choose(
        self, ask: Ask, prefill: Fleet, decode: Fleet, eligible: Mask, now: float
    ) -> Choice | Later:
        p_terms, p_held, p_seconds = self._prefill_terms(ask, prefill, now)
        p_cost = _total(p_terms, prefill.ready)
        p = _argmin(p_cost, prefill.last_placement)
        free_at = max(now, float(prefill.busy_until[p]))
        d_terms, d_held = self._decode_terms(ask, decode, free_at, prefill.worker(p), now)
        d_cost = _total(d_terms, _not_avoided(eligible, ask))
        d = _argmin(d_cost, decode.last_placement)
        best = float(p_cost[p] + d_cost[d])
        route: Route = "remote"
        seconds, local_s = float(p_seconds[p]), 0.0
        routes = [Term(d, best, int(d_held[d]), {"remote": best})]
        for other in self._holders(d_held, d_cost):
            held = int(d_held[other])
            if self.limits.pull:
                pulled = np.maximum(p_held, held)
                compute = np.where(
                    held > p_held,
                    self.rates.prefill_s(ask.prompt_len - pulled, pulled)
                    + self.rates.transfer_s(np.maximum(0, held - p_held)),
                    p_seconds,
                )
                pull_cost = p_cost - p_terms["compute"] + compute
                source = _argmin(pull_cost, prefill.last_placement)
                cost = float(pull_cost[source] + d_cost[other])
                routes.append(Term(other, cost, held, {"remote+pull": cost}))
                if cost < best and held > p_held[source]:
                    best, route, p, d = cost, "remote+pull", source, other
                    seconds, local_s = float(compute[source]), 0.0
            local = self._local_s(ask, decode, other, held)
            if local is not None:
                cost = local + float(d_cost[other] - d_terms["transfer"][other])
                routes.append(Term(other, cost, held, {"local": cost}))
                if cost < best:
                    best, route, d, local_s = cost, "local", other, local
        if route != "local":
            later = self._later(ask, prefill, p, seconds, now)
            if later:
                return later
        reasons = {
            "prefill": _explain(p_terms, p_cost, p_held),
            "decode": _explain(d_terms, d_cost, d_held),
            "route": routes,
        }
        return Choice(
            p,
            d,
            route,
            prefill_s=0.0 if route == "local" else seconds,
            decode_s=local_s if route == "local" else float(d_terms["transfer"][d]),
            prefill_held=int(p_held[p]),
            decode_held=int(d_held[d]),
            reasons=reasons,
        )

    def choose_prefill(
        self, ask: Ask, prefill: Fleet, now: float
    ) -> tuple[int, int, float, Later | None, list[Term]]:
        """(slot, tokens held, seconds to compute, whether to wait, reasons)."""
        terms, held, seconds = self._prefill_terms(ask, prefill, now)
        cost = _total(terms, prefill.ready)
        slot = _argmin(cost, prefill.last_placement)
        later = self._later(ask, prefill, slot, float(seconds[slot]), now)
        return slot, int(held[slot]), float(seconds[slot]), later, _explain(terms, cost, held)

    # --- terms ---

    def _prefill_terms(
        self, ask: Ask, fleet: Fleet, now: float
    ) -> tuple[dict[str, Floats], Lengths, Floats]:
        held = np.minimum(fleet.index.match(ask.hashes, len(fleet)), ask.prompt_len - 1)
        seconds = self.rates.prefill_s(ask.prompt_len - held, held)
        terms = {
            "queue": self.weights.queue * self._queue(ask, fleet, now),
            "compute": seconds,
            "balance": self.weights.balance * fleet.excess(now),
        }
        return terms, held, seconds

    def _decode_terms(
        self, ask: Ask, fleet: Fleet, free_at: float, source: WorkerId, now: float
    ) -> tuple[dict[str, Floats], Lengths]:
        """`source` is the prefill worker, which will be free at `free_at`."""
        held = np.minimum(fleet.index.match(ask.hashes, len(fleet)), ask.prompt_len)
        empty = float(self.rates.step_s(0, 0))
        extra = self.rates.step_s(fleet.attempts + 1, fleet.tokens + ask.prompt_len) - empty
        times = (extra / max(empty, 1e-9)) ** self.weights.itl_power
        # Decode has a prefix sent once: who shares one that is still on its way waits for it.
        here = fleet.index.match(ask.hashes, len(fleet), expected=False)
        wait = np.where(held > here, np.maximum(0.0, fleet.landing_until - free_at), 0.0)
        links = self.rates.bandwidths(source, fleet.slots, len(fleet))
        terms = {
            "load": self.weights.itl_tokens * extra * times,
            "transfer": self.rates.transfer_s(ask.prompt_len - held, links),
            "wait": self.weights.queue * wait,
            "balance": self.weights.decode_balance * fleet.excess(now),
        }
        return terms, held

    def _queue(self, ask: Ask, fleet: Fleet, now: float) -> Floats:
        queue = fleet.queue_s(now)
        if ask.pledge is not None:
            slot, seconds = ask.pledge
            queue[slot] -= seconds
        return queue

    def _later(self, ask: Ask, fleet: Fleet, slot: int, seconds: float, now: float) -> Later | None:
        backlog = float(fleet.busy_until[slot]) - now
        if backlog <= self.weights.bind_ahead_s:
            return None
        return Later(slot, seconds, now + backlog - self.weights.bind_ahead_s)

    def _holders(self, held: Lengths, cost: Floats) -> list[int]:
        """The decode workers that hold most of the prompt, those that may be chosen."""
        if not (self.limits.pull or self.limits.local):
            return []
        useful = np.flatnonzero(np.isfinite(cost) & (held > 0))
        if len(useful) > WEIGHED:
            useful = useful[np.argpartition(-held[useful], WEIGHED)[:WEIGHED]]
        return [int(slot) for slot in useful]

    def _local_s(self, ask: Ask, fleet: Fleet, slot: int, held: int) -> float | None:
        """Seconds until decode has computed the tail between its steps, None if it may not."""
        if not self.limits.local:
            return None
        held = min(held, ask.prompt_len - 1)
        tail = ask.prompt_len - held
        step = float(self.rates.step_s(int(fleet.attempts[slot]), int(fleet.tokens[slot])))
        room = self.limits.itl_limit_s - step if fleet.attempts[slot] else np.inf
        chunk = min(tail, self.limits.chunk_tokens)
        while chunk and self.rates.prefill_s(chunk, held) > room:
            chunk //= 2
        if not chunk or tail > chunk * self.limits.local_max_steps:
            return None
        steps = -(-tail // chunk)
        beside = step * steps if fleet.attempts[slot] else 0.0
        return float(self.rates.prefill_s(tail, held)) + beside


def make_placement_policy(
    name: str, rates: Rates, weights: Weights, seed: int = 0
) -> PlacementPolicy:
    """ValueError if there is no such policy."""
    match name:
        case "cost":
            return Cost(rates, weights)
        case "prefix_prefill_only":
            return PrefixPrefillOnly(rates, weights)
        case "least_loaded":
            return LeastLoaded(rates)
        case "round_robin":
            return RoundRobin(rates)
        case "random":
            return Random(rates, seed)
    raise ValueError(f"unknown placement policy {name!r}; allowed: {', '.join(POLICIES)}")


POLICIES = ("cost", "prefix_prefill_only", "least_loaded", "round_robin", "random")


def _not_avoided(eligible: Mask, ask: Ask) -> Mask:
    if not ask.avoid:
        return eligible
    wanted = eligible.copy()
    wanted[list(ask.avoid)] = False
    return wanted if wanted.any() else eligible


def _total(terms: dict[str, Floats], allowed: Mask) -> Floats:
    total: Floats = np.where(allowed, sum(terms.values()), np.inf)
    return total


def _argmin(cost: Floats, last_placement: NDArray[np.int64]) -> int:
    """The cheapest; the longest unused of equals."""
    equal = np.flatnonzero(cost <= cost.min() + 1e-12)
    return int(equal[last_placement[equal].argmin()])


def _explain(terms: dict[str, Floats], cost: Floats, held: Lengths) -> list[Term]:
    order = np.flatnonzero(np.isfinite(cost))
    if len(order) > EXPLAINED:
        order = order[np.argpartition(cost[order], EXPLAINED)[:EXPLAINED]]
    return [
        Term(
            int(slot),
            float(cost[slot]),
            int(held[slot]),
            {name: float(values[slot]) for name, values in terms.items()},
        )
        for slot in order[np.argsort(cost[order])]
    ]
