"""Which prefill and which decode worker serve a request, and by which route: a cost in seconds.

    prefill p    queue_weight x queue(p) + compute(prompt - held by p) + balance x excess work(p)
    decode d     load(d) + transfer(prompt - held by d) + queue_weight x wait(d)
                 + balance x excess work(d)
    below        what lies on a worker's lower tiers is promoted, where reading it and computing (or
                 sending) the rest takes less than computing (or sending) it
    remote         prefill(p) + decode(d)
    remote+pull    the same, but p reads from d what only d holds: computes less, moves less again
    local          no p: d computes a short tail between its steps, within the ITL limit

`docs/placement.md` says where the weights come from. Everything is looked at for all workers at
once, as arrays by slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.below import Holdings, look_below
from pd_cluster.coordinator.by_load import LeastLoaded, Random, RoundRobin
from pd_cluster.coordinator.choice import (
    Ask,
    Choice,
    Later,
    Mask,
    PlacementPolicy,
    Term,
    Weights,
    not_avoided,
)
from pd_cluster.coordinator.costs import Floats, Rates
from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.coordinator.index import Lengths
from pd_cluster.types import Route, WorkerId

# Candidates of each side whose terms are kept as the reasons of a placement.
EXPLAINED = 8
ROUNDING_S = 1e-6
# Decode workers, those that hold most, for which the routes by way of their cache are weighed.
WEIGHED = 8


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
        target = self._load.pick(decode, not_avoided(eligible, ask))
        return Choice(
            slot,
            target,
            prefill_s=self._cost.work_s(prefill, slot, seconds, now),
            prefill_held=held,
            reasons={"prefill": reasons},
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
        p_terms, p_has, p_seconds = self._prefill_terms(ask, prefill, now)
        p_cost = _total(p_terms, prefill.ready)
        p = _argmin(p_cost, prefill.last_placement)
        free_at = max(now, float(prefill.busy_until[p]))
        d_terms, d_has, links = self._decode_terms(ask, decode, free_at, prefill.worker(p), now)
        d_cost = _total(d_terms, not_avoided(eligible, ask))
        d = _argmin(d_cost, decode.last_placement)
        best = float(p_cost[p] + d_cost[d])
        route: Route = "remote"
        seconds, local_s = float(p_seconds[p]), 0.0
        has, sent_s = d_has.at(d), float(d_terms["transfer"][d])
        routes = [Term(d, best, has.held, {"remote": best}, has.below)]
        for other in self._holders(d_has, d_cost):
            for there in d_has.ways(other):
                held = there.held + there.below
                rest_s, without = float(d_terms["transfer"][other]), float(d_cost[other])
                if d_has.below:
                    best_s = rest_s + float(d_terms["promote"][other])
                    rest_s = self._sent_s(ask, held, other, links)
                    without += there.promote_s + rest_s - best_s
                if self.limits.pull:
                    pulled = np.maximum(p_has.reach, held)
                    compute = np.where(
                        held > p_has.reach,
                        self.rates.prefill_s(ask.prompt_len - pulled, pulled)
                        + self.rates.transfer_s(np.maximum(0, held - p_has.reach)),
                        p_seconds,
                    )
                    pull_cost = p_cost - p_terms["compute"] + compute
                    source = _argmin(pull_cost, prefill.last_placement)
                    cost = float(pull_cost[source] + without)
                    routes.append(Term(other, cost, there.held, {"remote+pull": cost}, there.below))
                    if cost < best and held > p_has.reach[source]:
                        best, route, p, d, has = cost, "remote+pull", source, other, there
                        seconds, sent_s = float(compute[source]), rest_s
                local = self._local_s(ask, decode, other, held)
                if local is not None:
                    cost = local + (without - rest_s)
                    routes.append(Term(other, cost, there.held, {"local": cost}, there.below))
                    if cost < best:
                        best, route, d, has, local_s = cost, "local", other, there, local
        if route != "local":
            later = self._later(ask, prefill, p, int(p_has.reach[p]), seconds, now)
            if later:
                return later
        reasons = {
            "prefill": _explain(p_terms, p_cost, p_has),
            "decode": _explain(d_terms, d_cost, d_has),
            "route": routes,
        }
        return Choice(
            p,
            d,
            route,
            prefill_s=0.0 if route == "local" else self.work_s(prefill, p, seconds, now),
            decode_s=local_s if route == "local" else sent_s,
            prefill_held=int(p_has.held[p]),
            decode_held=has.held,
            prefill_below=int(p_has.reach[p] - p_has.held[p]),
            decode_below=has.below,
            promote=has.below > 0 or not d_has.lies_below(d),
            reasons=reasons,
        )

    def choose_prefill(
        self, ask: Ask, prefill: Fleet, now: float
    ) -> tuple[int, int, float, Later | None, list[Term]]:
        """(slot, tokens held, seconds to compute, whether to wait, reasons)."""
        terms, has, seconds = self._prefill_terms(ask, prefill, now)
        cost = _total(terms, prefill.ready)
        slot = _argmin(cost, prefill.last_placement)
        later = self._later(ask, prefill, slot, int(has.reach[slot]), float(seconds[slot]), now)
        return slot, int(has.held[slot]), float(seconds[slot]), later, _explain(terms, cost, has)

    def work_s(self, fleet: Fleet, slot: int, seconds: float, now: float) -> float:
        """What a prompt adds to its worker's work: who finds others there shares their step."""
        if fleet.busy_until[slot] <= now:
            return seconds
        return max(0.0, seconds - float(self.rates.prefill.coefficients[0]))

    # --- terms ---

    def _prefill_terms(
        self, ask: Ask, fleet: Fleet, now: float
    ) -> tuple[dict[str, Floats], Holdings, Floats]:
        longest = ask.prompt_len - 1
        held = np.minimum(fleet.index.match(ask.hashes, len(fleet)), longest)

        def compute(known: Lengths) -> Floats:
            return np.asarray(self.rates.prefill_s(ask.prompt_len - known, known), np.float64)

        has = look_below(held, fleet.index.match_below(ask.hashes, held), longest, self.rates)
        seconds = has.choose(compute)
        terms = {
            "queue": self.weights.queue * self._queue(ask, fleet, now),
            "compute": seconds,
            "balance": self.weights.balance * fleet.excess(now),
        }
        if has.below:
            terms["promote"] = has.promote_s
        return terms, has, seconds

    def _decode_terms(
        self, ask: Ask, fleet: Fleet, free_at: float, source: WorkerId, now: float
    ) -> tuple[dict[str, Floats], Holdings, Floats]:
        """`source` is the prefill worker, which will be free at `free_at`. Also each link's
        factor.
        """
        held = np.minimum(fleet.index.match(ask.hashes, len(fleet)), ask.prompt_len)
        empty = float(self.rates.step_s(0, 0))
        extra = self.rates.step_s(fleet.attempts + 1, fleet.tokens + ask.prompt_len) - empty
        times = (extra / max(empty, 1e-9)) ** self.weights.itl_power
        # Decode has a prefix sent once: who shares one that is still on its way waits for it.
        here = fleet.index.match(ask.hashes, len(fleet), expected=False)
        wait = np.where(held > here, np.maximum(0.0, fleet.landing_until - free_at), 0.0)
        links = self.rates.link_factors(source, fleet.slots, len(fleet))

        def send(known: Lengths) -> Floats:
            return self.rates.transfer_s(ask.prompt_len - known, links)

        below = fleet.index.match_below(ask.hashes, held)
        has = look_below(held, below, ask.prompt_len, self.rates)
        terms = {
            "load": self.weights.itl_tokens * extra * times,
            "transfer": has.choose(send),
            "wait": self.weights.queue * wait,
            "balance": self.weights.decode_balance * fleet.excess(now),
        }
        if has.below:
            terms["promote"] = has.promote_s
        return terms, has, links

    def _sent_s(self, ask: Ask, held: int, slot: int, links: Floats) -> float:
        """Seconds to send decode what it does not hold."""
        missing = np.array(ask.prompt_len - held)
        return float(self.rates.transfer_s(missing, float(links[slot])))

    def _queue(self, ask: Ask, fleet: Fleet, now: float) -> Floats:
        queue = fleet.queue_s(now)
        if ask.pledge is not None:
            slot, seconds = ask.pledge
            queue[slot] -= seconds
        return queue

    def _later(
        self, ask: Ask, fleet: Fleet, slot: int, held: int, seconds: float, now: float
    ) -> Later | None:
        """A worker may have as much before it as fills a step: prompts that are there together are
        computed in one.
        """
        backlog = float(fleet.busy_until[slot]) - now
        others = self.weights.bind_ahead_tokens - (ask.prompt_len - held)
        ahead = self.weights.bind_ahead_s
        if others > 0:
            ahead = max(ahead, float(self.rates.prefill_s(others, 0)) + ROUNDING_S)
        if backlog <= ahead:
            return None
        return Later(slot, seconds, now + backlog - ahead)

    def _holders(self, has: Holdings, cost: Floats) -> list[int]:
        """The decode workers that hold most of the prompt, those that may be chosen."""
        if not (self.limits.pull or self.limits.local):
            return []
        held = has.most
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


def _total(terms: dict[str, Floats], allowed: Mask) -> Floats:
    total: Floats = np.where(allowed, sum(terms.values()), np.inf)
    return total


def _argmin(cost: Floats, last_placement: NDArray[np.int64]) -> int:
    """The cheapest; the longest unused of equals."""
    equal = np.flatnonzero(cost <= cost.min() + 1e-12)
    return int(equal[last_placement[equal].argmin()])


def _explain(terms: dict[str, Floats], cost: Floats, has: Holdings) -> list[Term]:
    order = np.flatnonzero(np.isfinite(cost))
    if len(order) > EXPLAINED:
        order = order[np.argpartition(cost[order], EXPLAINED)[:EXPLAINED]]
    return [
        Term(
            int(slot),
            float(cost[slot]),
            int(has.held[slot]),
            {name: float(values[slot]) for name, values in terms.items()},
            int(has.reach[slot] - has.held[slot]),
        )
        for slot in order[np.argsort(cost[order])]
    ]
