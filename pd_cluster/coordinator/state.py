"""What the coordinator knows and decides, pure: who is there, who waits, who serves what.

    PlaceRequest ──► waiting, in the order of the schedule policy ──► placed (a lease) ──► ended
                        │ never fits: 400   │ no room in the queue: 429   │ lease unclaimed
                        │ nobody there: 503 │ out of time: 504

Load is counted when an attempt is placed, not when its worker reports it, so that a burst spreads.
A request is bound late: it stays in the queue until the worker that is best for it is about to be
free, and by then another may be better. A placement is a lease: if no report of its decode worker
names it within `lease_s`, it is taken back.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pd_cluster.config import Config
from pd_cluster.coordinator.accounts import CoordinatorStatistics, Running
from pd_cluster.coordinator.admission import NewTokenRatio, growth
from pd_cluster.coordinator.choice import Ask, Choice, Later, RouteLimits
from pd_cluster.coordinator.costs import Measured, Rates
from pd_cluster.coordinator.early import EarlyRequests
from pd_cluster.coordinator.explain import Explanations
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.placement import make_placement_policy
from pd_cluster.coordinator.prefix_hash import unpack_hashes
from pd_cluster.coordinator.queue import MAX_COMPARED, Queue, Waiting, expired, make_queue_policy
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.coordinator.workers import EXPECTED_GRACE_S, Lease, Workers, WorkerState
from pd_cluster.tombstones import Tombstones
from pd_cluster.types import (
    MAX_RETRACTIONS,
    AttemptEnded,
    AttemptId,
    MakeRoom,
    Placement,
    PlaceRequest,
    Rejection,
    ReportReply,
    WorkerId,
    WorkerReport,
)

# Seconds that a rejected client should wait, for lack of a better estimate.
RETRY_AFTER_S = 1.0
# Between two tries to have lower priorities make room for one request.
PREEMPT_AGAIN_S = 1.0
# A retraction so soon after the order is taken for its consequence.
PREEMPT_GRACE_S = 5.0
MAX_UNTOLD = 10_000


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to a PlaceRequest."""

    attempt: AttemptId
    reply: Placement | Rejection


class CoordinatorState:
    """Events change it through one method each; all times are seconds of one clock."""

    def __init__(
        self,
        config: Config,
        scheduling: Scheduling | None = None,
        *,
        page_size: int | None = None,
    ) -> None:
        self.scheduling = scheduling or Scheduling.of(config)
        self.max_queued = config.max_queued_requests
        self.max_running = config.max_running_requests
        self.lease_s = config.timeouts.lease_s
        self.worker_timeout_s = 20 * config.timeouts.heartbeat_s
        self.cluster = Workers(page_size or config.page_size)
        self.queue = Queue(
            make_queue_policy(self.scheduling.schedule_policy, self.scheduling.seed),
            by_priority=self.scheduling.enable_priority_scheduling,
        )
        self.leases: dict[AttemptId, Lease] = {}
        self.rates = Rates(self.scheduling.priors)
        self.ratio = NewTokenRatio(self.scheduling.schedule_conservativeness)
        self.statistics = CoordinatorStatistics()
        self.lost: dict[str, WorkerReport] = {}  # the last ones of workers that are gone
        self.explanations = Explanations()
        # When to call `tick` at the latest, because a worker will then be about to be free.
        self.wake_at = float("inf")
        settings = self.scheduling
        self._policy = make_placement_policy(
            settings.placement, self.rates, settings.weights, settings.seed
        )
        self._orders: list[tuple[WorkerId, MakeRoom]] = []
        # Released because their worker no longer named them; their ends are still to be told.
        self._untold: OrderedDict[AttemptId, Lease] = OrderedDict()
        self._tombstones = Tombstones()
        self._early = EarlyRequests(config.timeouts.heartbeat_s, self.max_queued)
        self._draining: frozenset[str] = frozenset()
        self._expected: list[tuple[float, AttemptId]] = []
        self._running = Running()

    @property
    def workers(self) -> dict[str, WorkerState]:
        return self.cluster.by_name

    @property
    def waiting(self) -> OrderedDict[AttemptId, Waiting]:
        return self.queue.entries

    # --- workers ---

    def report(self, report: WorkerReport, now: float) -> tuple[ReportReply, list[Answer]]:
        """A heartbeat. A new incarnation takes the place of the old one."""
        known = self.workers.get(report.worker.name)
        if known is None or known.id != report.worker:
            difference = self.cluster.differences(report)
            if difference:
                return ReportReply(error=difference), []
            if known is not None:
                self._forget(known, now)
            known = self.cluster.join(report, now)
            self._early.seen(report.role)
            self.lost.pop(report.worker.name, None)
            self._policy.limits = self._limits()
            self._admit(known, now)
        known.report, known.seen = report, now
        fleet = self.cluster.fleet(report.role)
        fleet.available[known.slot] = report.available
        if report.role == "decode":
            fleet.full[known.slot] = False
            self._reconcile(known, now)
        else:
            self._correct_backlog(known, now)
        reply = ReportReply(retraction_policy=self.scheduling.retraction_policy)
        return reply, self._place_early(now) + self._place(now)

    def kv_events(self, update: KvUpdate, now: float) -> bool:
        """What changed in a worker's cache; False asks it for a snapshot."""
        known = self.cluster.find(update.worker)
        return known is None or self.cluster.fleet(known.report.role).index.apply(update)

    def set_draining(self, names: Collection[str], now: float) -> list[Answer]:
        """The workers of these names, and no others, get no new work: they are to leave.

        Who waits for one of them is considered again. What they run goes on.
        """
        for gone in self._draining - frozenset(names) - self.workers.keys():
            self.lost.pop(gone, None)
        self._draining = frozenset(names)
        for worker in self.workers.values():
            self._admit(worker, now)
        return self._place(now)

    def measured(self, worker: WorkerId, measured: Iterable[Measured]) -> None:
        """How long a worker's steps and transfers took."""
        for each in measured:
            self.rates.observe(worker, each)

    def worker_lost(self, worker: WorkerId, now: float) -> list[Answer]:
        known = self.cluster.find(worker)
        if known is not None:
            self._forget(known, now)
        return self._place(now)

    def standing(self, worker: WorkerState) -> str:
        return "draining" if worker.id.name in self._draining else "ready"

    # --- attempts ---

    def place(self, request: PlaceRequest, now: float) -> list[Answer]:
        """Admits, queues or rejects; the answer for this attempt may come later."""
        lease = self.leases.get(request.attempt)
        if lease is not None:
            return [Answer(request.attempt, lease.placement)]
        if request.attempt in self.queue or request.attempt in self._early.requests:
            return []
        if self._tombstones.take(request.attempt):
            return [self._reject(request, 503, "withdrawn", "its end overtook it")]
        if self._early.waits(request, now):
            return []
        refused = self._never(request)
        if refused is not None:
            return [refused]
        queued = self.queue.fresh
        mine = self.queue.by_tenant[request.tenant]
        hashes = unpack_hashes(request.blocks)
        entry = self.queue.add(request, hashes, now)
        if self.scheduling.schedule_policy == "lpm":
            self._look(entry)
        answers = self._place(now)
        if request.attempt not in self.queue or request.resumed:
            return answers
        limit = self.scheduling.max_queued_per_tenant
        if limit is not None and mine >= limit:
            message = f"{mine} requests of this tenant are waiting; at most {limit} may"
            return [*answers, self._drop(entry, 429, "tenant_queue_full", message)]
        if queued >= self.max_queued:
            message = f"{queued} requests are waiting; at most {self.max_queued} may"
            answers.append(self._drop(self._least_wanted(entry), 429, "queue_full", message))
        return answers

    def ended(self, event: AttemptEnded, now: float) -> list[Answer]:
        """An attempt holds nothing any more, or its client no longer wants a placement."""
        if self._early.requests.pop(event.attempt, None) is not None:
            return []
        entry = self.queue.remove(event.attempt)
        if entry is not None:
            self._unpledge(entry)
        lease = self.leases.get(event.attempt)
        if lease is None:
            if event.attempt in self._untold:
                self._count_end(event, self._untold.pop(event.attempt), now)
            elif entry is None:
                self._tombstones.add(event.attempt, now)
            return [] if entry is None else self._place(now)
        out_of_pages = self._count_end(event, lease, now)
        self._release(lease, now)
        if self.cluster.find(lease.placement.decode) is not None:
            full = event.outcome == "refused" or out_of_pages
            self.cluster.decode.full[lease.choice.decode] = full
        return self._place(now)

    def tick(self, now: float) -> list[Answer]:
        """Enforces deadlines; to be called every second or so, and at `wake_at`."""
        self._tombstones.expire(now)
        answers: list[Answer] = []
        for entry in expired(self.queue.entries.values(), now):
            message = f"no worker had room within {entry.request.timeout_s:g} s"
            answers.append(self._drop(entry, 504, "queue_timeout", message))
        for lease in [lease for lease in self.leases.values() if not lease.claimed]:
            if now - lease.placed >= self.lease_s:
                self._release(lease, now)
                self.statistics.leases_expired += 1
        while self._expected and self._expected[0][0] <= now:
            _, attempt = heapq.heappop(self._expected)
            if attempt in self.leases:
                self.cluster.no_longer_expected(self.leases[attempt])
        for worker in list(self.workers.values()):
            if now - worker.seen >= self.worker_timeout_s:
                self._forget(worker, now)
        if self.scheduling.schedule_policy == "lpm":
            for entry in list(self.queue.entries.values())[:MAX_COMPARED]:
                self._look(entry)
        return answers + self._place_early(now) + self._place(now)

    def take_orders(self) -> list[tuple[WorkerId, MakeRoom]]:
        """What decode workers are to be told since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def explain(self, attempt: AttemptId) -> dict[str, Any] | None:
        """Why an attempt was placed where it was: each candidate's terms, in seconds."""
        return self.explanations.get(attempt)

    def validate(self) -> None:
        assert not self.leases.keys() & self.queue.entries.keys()
        self.cluster.validate(self.leases)
        work = Counter[str]()
        for lease in self.leases.values():
            work[lease.request.tenant] += lease.request.prompt_len
        assert work == +self._running.work_by_tenant
        pledged = [0.0] * len(self.cluster.prefill)
        for entry in self.queue.entries.values():
            if entry.pledge is not None:
                pledged[entry.pledge[0]] += entry.pledge[1]
        for slot, seconds in enumerate(pledged):
            assert abs(self.cluster.prefill.pledged[slot] - seconds) < 1e-6

    # --- within ---

    def _admit(self, worker: WorkerState, now: float) -> None:
        """Whether a worker gets work: not while it is to leave."""
        admitted = worker.id.name not in self._draining
        fleet = self.cluster.fleet(worker.report.role)
        if fleet.ready[worker.slot] == admitted:
            return
        fleet.ready[worker.slot] = admitted
        if worker.report.role == "prefill" and not admitted:
            self._turn_away(worker, now)

    def _turn_away(self, worker: WorkerState, now: float) -> None:
        """Whoever waits for this prefill worker looks for another."""
        self._reconsider(worker.slot, now)
        for entry in self.queue.entries.values():
            if entry.pledge is not None and entry.pledge[0] == worker.slot:
                self._unpledge(entry)

    def _limits(self) -> RouteLimits:
        """The routes that every worker can do, of those that are wanted."""
        wanted = self.scheduling.limits
        there = [set(worker.report.routes) for worker in self.workers.values()]
        common = set.intersection(*there) if there else set()
        return replace(
            wanted,
            pull=wanted.pull and "remote+pull" in common,
            local=wanted.local and "local" in common,
        )

    def _never(self, request: PlaceRequest) -> Answer | None:
        """A rejection for what cannot be served whatever happens, or by nobody who is here."""
        prefill, decode = self.cluster.prefill, self.cluster.decode
        missing = [
            role for role, fleet in (("prefill", prefill), ("decode", decode))
            if not fleet.ready.any()
        ]  # fmt: skip
        if missing:
            message = f"no {' and no '.join(missing)} worker is ready"
            return self._reject(request, 503, "no_workers", message)
        demand = request.prompt_len + request.max_tokens
        largest = int(decode.capacity[decode.ready].max())
        if demand > largest:
            message = (
                f"the request needs {demand} tokens of KV ({request.prompt_len} of its prompt);"
                f" the largest decode worker has {largest}"
            )
            return self._reject(request, 400, "never_fits", message)
        return None

    def _place_early(self, now: float) -> list[Answer]:
        return [answer for each in self._early.take(now) for answer in self.place(each, now)]

    def _place(self, now: float) -> list[Answer]:
        """Serves the queue, in its policy's order, as long as there is room."""
        answers: list[Answer] = []
        self.wake_at = float("inf")
        again = True
        while again and len(self.queue) and self._anyone():
            again = False
            order, oldest_due = self.queue.order(
                self._running.work_by_tenant, self._running.by_key, now
            )
            for entry in order:
                if entry.not_before > now:
                    self.wake_at = min(self.wake_at, entry.not_before)
                    continue
                if self._tenant_full(entry):
                    continue
                answer = self._try(entry, now)
                if answer is None:
                    self._preempt(entry, order, now)
                    break  # decode has no room for it, and nobody overtakes
                if isinstance(answer, float):
                    self.wake_at = min(self.wake_at, answer)
                    continue
                answers.append(answer)
                if oldest_due:
                    again = True  # its turn is over: back to the policy's order
                    break
        return answers

    def _anyone(self) -> bool:
        decode = self.cluster.decode
        free = decode.ready & ~decode.full & (decode.attempts < self.max_running)
        if self.scheduling.enable_priority_scheduling:
            free = decode.ready  # room can be made
        return bool(free.any()) and bool(self.cluster.prefill.ready.any())

    def _tenant_full(self, entry: Waiting) -> bool:
        limit = self.scheduling.max_running_per_tenant
        return limit is not None and self._running.by_tenant[entry.request.tenant] >= limit

    def _try(self, entry: Waiting, now: float) -> Answer | float | None:
        """Places the request, or says until when it waits, or None if decode has no room."""
        request, cluster = entry.request, self.cluster
        eligible = cluster.has_room(request, self.ratio.at(now), self.max_running)
        if not eligible.any():
            return None
        avoid = frozenset(
            cluster.decode.slots[w] for w in request.avoid if w in cluster.decode.slots
        )
        ask = Ask(request.prompt_len, request.max_tokens, entry.hashes, avoid, entry.pledge)
        chosen = self._policy.choose(ask, cluster.prefill, cluster.decode, eligible, now)
        self._unpledge(entry)
        if isinstance(chosen, Later):
            if chosen.until + chosen.prefill_s >= entry.deadline:
                message = "its deadline can no longer be met"
                return self._drop(entry, 504, "deadline", message)
            entry.not_before = chosen.until
            entry.pledge = (chosen.prefill, chosen.prefill_s)
            cluster.prefill.pledged[chosen.prefill] += chosen.prefill_s
            return chosen.until
        return self._bind(entry, chosen, now)

    def _preempt(self, entry: Waiting, order: list[Waiting], now: float) -> None:
        """Has lower priorities make room for the request, on the worker where most of it is.

        Who has waited so long that it comes before a higher priority takes the place of an equal,
        so that the other need not wait for long. Asked again only after a while, and of nobody who
        was retracted often already: so what has to go back and forth ends.
        """
        if not self.scheduling.enable_priority_scheduling or now < entry.preempt_at:
            return
        request, decode = entry.request, self.cluster.decode
        aged = any(other.request.priority > request.priority for other in order)
        below = request.priority + aged
        best: tuple[int, WorkerState, list[Lease]] | None = None
        for worker in self.workers.values():
            if worker.report.role != "decode" or not decode.ready[worker.slot]:
                continue
            lower = [
                lease
                for lease in map(self.leases.__getitem__, sorted(worker.placed))
                if lease.request.priority < below and lease.request.retractions < MAX_RETRACTIONS
            ]
            room = sum(lease.request.prompt_len for lease in lower)
            if lower and (best is None or room > best[0]):
                best = room, worker, lower
        if best is None:
            return
        _, worker, lower = best
        entry.preempt_at = now + PREEMPT_AGAIN_S
        for lease in lower:
            lease.asked = now
        ratio = self.ratio.at(now)
        message = MakeRoom(
            tokens=math.ceil(self.cluster.needed(request, ratio)[worker.slot]),
            candidates=tuple(
                (lease.request.attempt, int(ratio * growth(lease.request.max_tokens)))
                for lease in lower
            ),
        )
        self._orders.append((worker.id, message))

    def _bind(self, entry: Waiting, choice: Choice, now: float) -> Answer:
        request, attempt = entry.request, entry.request.attempt
        self.queue.remove(attempt)
        self.queue.placed(entry)
        placement = Placement(
            attempt=attempt,
            prefill=self.cluster.prefill.worker(choice.prefill),
            decode=self.cluster.decode.worker(choice.decode),
            route=choice.route,
            promote=choice.promote,
        )
        lease = Lease(request, placement, choice, now, (now, now), list(entry.hashes))
        self.leases[attempt] = lease
        self.cluster.dispatch(lease, now)
        heapq.heappush(self._expected, (lease.work[1] + EXPECTED_GRACE_S, attempt))
        self.statistics.placed(choice.route)
        self._running.add(request)
        self.explanations.add(lease, now - entry.arrived, self.cluster)
        return Answer(attempt, placement)

    def _count_end(self, event: AttemptEnded, lease: Lease, now: float) -> bool:
        """Whether the attempt ended because its worker had run out of pages."""
        self.statistics.ended(event.outcome)
        if event.outcome != "retracted" or now - lease.asked < PREEMPT_GRACE_S:
            return False
        self.ratio.retracted(now)
        return True

    def _reconcile(self, worker: WorkerState, now: float) -> None:
        """What the decode worker reports is alive; what it has forgotten is over."""
        reported = set(worker.report.attempts)
        for attempt in list(worker.placed):
            lease = self.leases[attempt]
            if attempt in reported:
                self.cluster.claim(lease)
            elif lease.claimed:
                self._release(lease, now)
                self._untold[attempt] = lease
                if len(self._untold) > MAX_UNTOLD:
                    self._untold.popitem(last=False)

    def _correct_backlog(self, worker: WorkerState, now: float) -> None:
        """What the prefill worker says of its queue overrules our estimate of it."""
        fleet, slot = self.cluster.prefill, worker.slot
        if worker.report.waiting:
            soonest = now + self.scheduling.weights.bind_ahead_s
            fleet.busy_until[slot] = max(float(fleet.busy_until[slot]), soonest)
        elif not worker.report.running:
            # Only what is still on its way there can be left to do.
            fresh = sum(
                lease.choice.prefill_s
                for lease in map(self.leases.__getitem__, worker.placed)
                if not lease.claimed
            )
            if now + fresh < fleet.busy_until[slot]:
                fleet.busy_until[slot] = now + fresh
                self._reconsider(slot, now)

    def _reconsider(self, slot: int, now: float) -> None:
        """A prefill worker will be free sooner than those were told that wait for it."""
        for entry in self.queue.entries.values():
            if entry.pledge is not None and entry.pledge[0] == slot:
                entry.not_before = now

    def _look(self, entry: Waiting) -> None:
        prefill = self.cluster.prefill
        entry.matched = int(prefill.index.match(entry.hashes, len(prefill)).max(initial=0))

    def _unpledge(self, entry: Waiting) -> None:
        if entry.pledge is not None:
            slot, seconds = entry.pledge
            self.cluster.prefill.pledged[slot] -= seconds
            entry.pledge = None

    def _release(self, lease: Lease, now: float) -> None:
        del self.leases[lease.request.attempt]
        self._running.remove(lease.request)
        self.cluster.release(lease, now)
        if now < lease.work[1]:
            self._reconsider(lease.choice.prefill, now)

    def _forget(self, worker: WorkerState, now: float) -> None:
        """A worker is gone: its leases end, the gateways will ask again."""
        if worker.id.name not in self._draining:  # else that was its purpose
            self.lost[worker.id.name] = worker.report
        for attempt in list(worker.placed):
            self._release(self.leases[attempt], now)
        if worker.report.role == "prefill":
            self._turn_away(worker, now)
        self.cluster.leave(worker)
        self.rates.forget(worker.id)
        self._policy.limits = self._limits()

    def _least_wanted(self, entry: Waiting) -> Waiting:
        """Who has to go from a full queue: the newcomer, unless priorities count."""
        if not self.scheduling.enable_priority_scheduling:
            return entry
        fresh = [each for each in self.queue.entries.values() if not each.request.resumed]
        return min(fresh, key=lambda each: (each.request.priority, -each.number))

    def _drop(self, entry: Waiting, status: int, reason: str, message: str) -> Answer:
        self._unpledge(entry)
        self.queue.remove(entry.request.attempt)
        return self._reject(entry.request, status, reason, message)

    def _reject(self, request: PlaceRequest, status: int, reason: str, message: str) -> Answer:
        self.statistics.rejected(reason)
        retry = RETRY_AFTER_S if status in (429, 503) else None
        rejection = Rejection(
            attempt=request.attempt,
            status=status,  # type: ignore[arg-type]
            reason=reason,
            message=message,
            retry_after_s=retry,
        )
        return Answer(request.attempt, rejection)
