"""What the coordinator knows and decides, pure: who is there, who waits, who serves what.

    PlaceRequest ──► waiting (first come, first served; resumed first) ──► placed ──► ended
                        │ no room in the queue: 429     │ out of time: 504    │ lease unclaimed

Load is counted when an attempt is placed, not when its worker reports it, so that a burst spreads.
A placement is a lease: if no report of its decode worker names it within `lease_s`, it is taken
back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pd_cluster.config import Config
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    Placement,
    PlaceRequest,
    Rejection,
    ReportReply,
    WorkerId,
    WorkerReport,
)

# Seconds that a rejected client should wait, for lack of a better estimate.
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class WorkerState:
    """A worker as last reported, and what was placed on it since."""

    report: WorkerReport
    seen: float
    placed: set[AttemptId] = field(default_factory=set)
    tokens: int = 0  # prompt tokens of what is placed on it
    # A decode worker that refused for lack of pages gets nothing until its next report.
    full: bool = False
    last_placement: int = 0
    draining: bool = False

    @property
    def id(self) -> WorkerId:
        return self.report.worker


@dataclass(slots=True)
class Lease:
    request: PlaceRequest
    placement: Placement
    placed: float
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to a PlaceRequest."""

    attempt: AttemptId
    reply: Placement | Rejection


@dataclass(slots=True)
class CoordinatorStatistics:
    """Counters since the start."""

    placements: int = 0
    rejections: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    leases_expired: int = 0


class CoordinatorState:
    """Events change it through one method each; all times are seconds of one clock."""

    def __init__(self, config: Config) -> None:
        self.max_queued = config.max_queued_requests
        self.max_running = config.max_running_requests
        self.lease_s = config.timeouts.lease_s
        self.worker_timeout_s = 20 * config.timeouts.heartbeat_s
        self.workers: dict[str, WorkerState] = {}
        self.waiting: OrderedDict[AttemptId, tuple[PlaceRequest, float]] = OrderedDict()
        self.leases: dict[AttemptId, Lease] = {}
        self.statistics = CoordinatorStatistics()

    # --- workers ---

    def report(self, report: WorkerReport, now: float) -> tuple[ReportReply, list[Answer]]:
        """A heartbeat. A new incarnation takes the place of the old one."""
        known = self.workers.get(report.worker.name)
        if known is None or known.id != report.worker:
            difference = self._difference(report)
            if difference:
                return ReportReply(error=difference), []
            if known is not None:
                self._forget(known)
            known = self.workers[report.worker.name] = WorkerState(report, now)
            known.tokens = 0
        known.report, known.seen, known.full = report, now, False
        if report.role == "decode":
            self._reconcile(known, now)
        return ReportReply(), self._place(now)

    def worker_lost(self, worker: WorkerId, now: float) -> list[Answer]:
        known = self.workers.get(worker.name)
        if known is not None and known.id == worker:
            self._forget(known)
            del self.workers[worker.name]
        return self._place(now)

    # --- attempts ---

    def place(self, request: PlaceRequest, now: float) -> list[Answer]:
        """Admits, queues or rejects; the answer for this attempt may come later."""
        lease = self.leases.get(request.attempt)
        if lease is not None:
            return [Answer(request.attempt, lease.placement)]
        if request.attempt in self.waiting:
            return []
        if not self._workers("prefill") or not self._workers("decode"):
            missing = " and no ".join(r for r in ("prefill", "decode") if not self._workers(r))
            return [self._reject(request, 503, "no_workers", f"no {missing} worker is ready")]
        queued = sum(not waiting.resumed for waiting, _ in self.waiting.values())
        self.waiting[request.attempt] = (request, now + request.timeout_s)
        if request.resumed:
            self.waiting.move_to_end(request.attempt, last=False)
        answers = self._place(now)
        if request.attempt in self.waiting and not request.resumed and queued >= self.max_queued:
            del self.waiting[request.attempt]
            message = f"{queued} requests are waiting; at most {self.max_queued} may"
            answers.append(self._reject(request, 429, "queue_full", message))
        return answers

    def ended(self, event: AttemptEnded, now: float) -> list[Answer]:
        """An attempt holds nothing any more, or its client no longer wants a placement."""
        self.waiting.pop(event.attempt, None)
        lease = self.leases.pop(event.attempt, None)
        if lease is None:
            return []
        outcomes = self.statistics.outcomes
        outcomes[event.outcome] = outcomes.get(event.outcome, 0) + 1
        self._release(lease)
        decode = self.workers.get(lease.placement.decode.name)
        if decode is not None and decode.id == lease.placement.decode:
            decode.full = event.outcome in ("refused", "retracted")
        return self._place(now)

    def tick(self, now: float) -> list[Answer]:
        """Enforces deadlines; to be called every second or so."""
        answers: list[Answer] = []
        for attempt, (request, deadline) in list(self.waiting.items()):
            if now >= deadline:
                del self.waiting[attempt]
                message = f"no worker had room within {request.timeout_s:g} s"
                answers.append(self._reject(request, 504, "queue_timeout", message))
        for lease in [lease for lease in self.leases.values() if not lease.claimed]:
            if now - lease.placed >= self.lease_s:
                del self.leases[lease.request.attempt]
                self._release(lease)
                self.statistics.leases_expired += 1
        for worker in list(self.workers.values()):
            if now - worker.seen >= self.worker_timeout_s:
                answers += self.worker_lost(worker.id, now)
        return answers + self._place(now)

    def validate(self) -> None:
        placed = [attempt for worker in self.workers.values() for attempt in worker.placed]
        assert set(placed) <= set(self.leases)
        assert not set(self.leases) & set(self.waiting)
        for worker in self.workers.values():
            expected = sum(self.leases[a].request.prompt_len for a in worker.placed)
            assert worker.tokens == expected

    # --- within ---

    def _workers(self, role: str) -> list[WorkerState]:
        return [
            worker
            for worker in self.workers.values()
            if worker.report.role == role and not worker.draining
        ]

    def _difference(self, report: WorkerReport) -> str | None:
        """How a new worker differs from those that are here, or None."""
        for other in self.workers.values():
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
        return None

    def _place(self, now: float) -> list[Answer]:
        """Serves the queue from its head as long as there is room."""
        answers: list[Answer] = []
        for attempt, (request, _) in list(self.waiting.items()):
            prefill = self._least_loaded("prefill", request)
            decode = self._least_loaded("decode", request)
            if prefill is None or decode is None:
                break
            del self.waiting[attempt]
            self.statistics.placements += 1
            placement = Placement(attempt=attempt, prefill=prefill.id, decode=decode.id)
            self.leases[attempt] = Lease(request, placement, now)
            for worker in (prefill, decode):
                worker.placed.add(attempt)
                worker.tokens += request.prompt_len
                worker.last_placement = self.statistics.placements
            answers.append(Answer(attempt, placement))
        return answers

    def _least_loaded(self, role: str, request: PlaceRequest) -> WorkerState | None:
        """The worker with fewest placed prompt tokens, the longest unused of equals; avoided ones
        only if there is no other."""
        candidates = self._workers(role)
        if role == "decode":
            candidates = [
                worker
                for worker in candidates
                if not worker.full and len(worker.placed) < self.max_running
            ]
        return min(
            candidates,
            key=lambda worker: (
                worker.id in request.avoid,
                worker.tokens,
                len(worker.placed),
                worker.last_placement,
            ),
            default=None,
        )

    def _reconcile(self, worker: WorkerState, now: float) -> None:
        """What the worker reports is alive; what it has forgotten is over."""
        reported = set(worker.report.attempts)
        for attempt in list(worker.placed):
            lease = self.leases[attempt]
            if attempt in reported:
                lease.claimed = True
            elif lease.claimed:
                del self.leases[attempt]
                self._release(lease)

    def _release(self, lease: Lease) -> None:
        for id_ in (lease.placement.prefill, lease.placement.decode):
            worker = self.workers.get(id_.name)
            if worker is not None and lease.request.attempt in worker.placed:
                worker.placed.discard(lease.request.attempt)
                worker.tokens -= lease.request.prompt_len

    def _forget(self, worker: WorkerState) -> None:
        """A worker is gone: its leases end, the gateways will ask again."""
        for attempt in list(worker.placed):
            lease = self.leases.pop(attempt)
            self._release(lease)

    def _reject(self, request: PlaceRequest, status: int, reason: str, message: str) -> Answer:
        rejections = self.statistics.rejections
        rejections[reason] = rejections.get(reason, 0) + 1
        retry = RETRY_AFTER_S if status in (429, 503) else None
        rejection = Rejection(
            attempt=request.attempt,
            status=status,  # type: ignore[arg-type]
            reason=reason,
            message=message,
            retry_after_s=retry,
        )
        return Answer(request.attempt, rejection)
