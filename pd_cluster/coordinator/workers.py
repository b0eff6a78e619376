"""Who is there: the workers of both roles, what they report, and what was placed on each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.admission import growth
from pd_cluster.coordinator.choice import Choice
from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.coordinator.holders import Stores
from pd_cluster.types import AttemptId, Placement, PlaceRequest, Role, WorkerId, WorkerReport

# What is expected to be held stays expected this long after it should have been computed (s).
EXPECTED_GRACE_S = 5.0


@dataclass(slots=True)
class WorkerState:
    """A worker as last reported, and what was placed on it since."""

    report: WorkerReport
    seen: float
    slot: int
    placed: set[AttemptId] = field(default_factory=set)

    @property
    def id(self) -> WorkerId:
        return self.report.worker


@dataclass(slots=True)
class Lease:
    """A placement and what it counts for. `work` is when prefill should be (start, finish)."""

    request: PlaceRequest
    placement: Placement
    choice: Choice
    placed: float
    work: tuple[float, float]
    hashes: list[int]
    claimed: bool = False
    expected: bool = True  # its prompt still counts as about to be held
    asked: float = float("-inf")  # when it was last among those that may make room for others


class Workers:
    """The two fleets, and what is on them. A worker's slot is valid for one life of it."""

    def __init__(self, page_size: int) -> None:
        self.by_name: dict[str, WorkerState] = {}
        stores = Stores()
        self.prefill = Fleet(page_size, stores)
        self.decode = Fleet(page_size, stores)
        self._placements = 0

    def fleet(self, role: Role) -> Fleet:
        return self.prefill if role == "prefill" else self.decode

    def join(self, report: WorkerReport, now: float) -> WorkerState:
        slot = self.fleet(report.role).join(report.worker, report.capacity, report.store)
        known = self.by_name[report.worker.name] = WorkerState(report, now, slot)
        return known

    def leave(self, worker: WorkerState) -> None:
        self.fleet(worker.report.role).leave(worker.id)
        del self.by_name[worker.id.name]

    def find(self, worker: WorkerId) -> WorkerState | None:
        """That life of the worker, if it is here."""
        known = self.by_name.get(worker.name)
        return known if known is not None and known.id == worker else None

    def differences(self, report: WorkerReport) -> str | None:
        """How a new worker differs from those that are here, or None."""
        for other in self.by_name.values():
            if other.id.name == report.worker.name:
                continue
            theirs = other.report.signature
            differing = [
                f"{key} is {report.signature.get(key)!r} here and {theirs.get(key)!r} there"
                for key in sorted(theirs.keys() | report.signature.keys())
                if report.signature.get(key) != theirs.get(key)
            ]
            if differing:
                return f"{report.worker} does not match {other.id}: {'; '.join(differing)}"
            break  # those that are here agree with each other
        return None

    # --- load ---

    def dispatch(self, lease: Lease, now: float) -> None:
        """Counts what a placement will cost, before its workers know of it."""
        attempt, choice = lease.request.attempt, lease.choice
        self._placements += 1
        prefill, decode = self.prefill, self.decode
        p, d = choice.prefill, choice.decode
        lease.work = (now, now)
        if choice.route != "local":
            lease.work = prefill.add_work(p, choice.prefill_s, now)
            prefill.attempts[p] += 1
            prefill.tokens[p] += lease.request.prompt_len
            prefill.last_placement[p] = self._placements
            prefill.index.expected.add(lease.hashes, p)
            self.by_name[lease.placement.prefill.name].placed.add(attempt)
        decode.add_work(d, choice.decode_s, now)
        landed = lease.work[1] + choice.decode_s
        decode.landing_until[d] = max(float(decode.landing_until[d]), landed)
        decode.attempts[d] += 1
        decode.tokens[d] += lease.request.prompt_len
        decode.growth[d] += growth(lease.request.max_tokens)
        decode.unclaimed[d] += lease.request.prompt_len - choice.decode_held
        decode.last_placement[d] = self._placements
        decode.index.expected.add(lease.hashes, d)
        self.by_name[lease.placement.decode.name].placed.add(attempt)

    def release(self, lease: Lease, now: float) -> None:
        """Takes back what it still counts for, on those of its workers that are still there."""
        attempt, choice = lease.request.attempt, lease.choice
        self.no_longer_expected(lease)
        prefill = self.find(lease.placement.prefill)
        if prefill is not None and attempt in prefill.placed:
            prefill.placed.discard(attempt)
            self.prefill.remove_work(choice.prefill, *lease.work, now)
            self.prefill.attempts[choice.prefill] -= 1
            self.prefill.tokens[choice.prefill] -= lease.request.prompt_len
        decode = self.find(lease.placement.decode)
        if decode is not None and attempt in decode.placed:
            decode.placed.discard(attempt)
            d = choice.decode
            self.decode.attempts[d] -= 1
            self.decode.tokens[d] -= lease.request.prompt_len
            self.decode.growth[d] -= growth(lease.request.max_tokens)
            if not lease.claimed:
                self.decode.unclaimed[d] -= lease.request.prompt_len - choice.decode_held

    def claim(self, lease: Lease) -> None:
        """A report of its decode worker names it: its prompt's pages are in `available`."""
        if not lease.claimed:
            lease.claimed = True
            d = lease.choice.decode
            self.decode.unclaimed[d] -= lease.request.prompt_len - lease.choice.decode_held

    def no_longer_expected(self, lease: Lease) -> None:
        """What it was about to hold is held by now, as events told, or will not be."""
        if not lease.expected:
            return
        lease.expected = False
        if lease.choice.route != "local" and self.find(lease.placement.prefill):
            self.prefill.index.expected.remove(lease.hashes, lease.choice.prefill)
        if self.find(lease.placement.decode):
            self.decode.index.expected.remove(lease.hashes, lease.choice.decode)

    def has_room(self, request: PlaceRequest, ratio: float, max_running: int) -> np.ndarray:
        """Mask of the decode workers that can take the request in, its growth included."""
        decode = self.decode
        fits = (decode.attempts == 0) | (self.needed(request, ratio) <= decode.available)
        mask: np.ndarray = decode.ready & ~decode.full & (decode.attempts < max_running) & fits
        return mask

    def needed(self, request: PlaceRequest, ratio: float) -> NDArray[np.float64]:
        """Tokens that each decode worker must have available to take the request in: for its
        prompt, those that are on their way, and a part of what all answers may grow by.
        """
        decode = self.decode
        growing = growth(request.max_tokens) + decode.growth
        return np.asarray(request.prompt_len + ratio * growing + decode.unclaimed, np.float64)

    def validate(self, leases: dict[AttemptId, Lease]) -> None:
        """Load is the sum of the leases; O(workers + leases)."""
        for worker in self.by_name.values():
            mine = [leases[attempt] for attempt in worker.placed]
            fleet = self.fleet(worker.report.role)
            slot = worker.slot
            assert fleet.workers[slot] == worker.id
            assert fleet.attempts[slot] == len(mine)
            assert fleet.tokens[slot] == sum(lease.request.prompt_len for lease in mine)
            if worker.report.role == "decode":
                assert fleet.growth[slot] == sum(growth(le.request.max_tokens) for le in mine)
                assert fleet.unclaimed[slot] == sum(
                    lease.request.prompt_len - lease.choice.decode_held
                    for lease in mine
                    if not lease.claimed
                )
        for fleet in (self.prefill, self.decode):
            fleet.index.validate()
            gone = [slot for slot, worker in enumerate(fleet.workers) if worker is None]
            assert not fleet.attempts[gone].any()
            assert not fleet.ready[gone].any()
