"""The prefill role, pure: jobs that compute prompts and push their pages into decode's memory.

    job.pages   [ matched: the tree's │ computed and published: the tree's │ not yet computed:
    private ]
                0                  cached                              published
                total
    decode      [ resident there: never sent │ the reservation: written by us, chunk by chunk
       ]

The job holds one lock, on the deepest node that it matched or published, until all its transfers
are over: so no page that a peer reads from can be evicted. A private page that turns out to be a
duplicate when published is released by the cache, which keeps it out of use while a transfer still
reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import numpy as np

from pd_cluster.cache.node import Node
from pd_cluster.cache.page_pool import OutOfPages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.states import Tracked, Transitions
from pd_cluster.types import (
    AbortPrefill,
    AttemptId,
    FirstToken,
    IntArray,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Sources,
    StartPrefill,
    WorkerId,
    unpack_ints,
)
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Connect,
    Instruction,
    Notify,
    Row,
    TransferEnded,
    WritePages,
)

JobState = Literal["waiting", "running", "sending", "stopping", "done"]

JOB_TRANSITIONS: Transitions[JobState] = {
    ("waiting", "running"): "pages allocated",
    ("waiting", "done"): "stopped before it began",
    ("running", "sending"): "first token sampled",
    ("running", "stopping"): "aborted or failed",
    ("sending", "stopping"): "aborted or failed",
    ("sending", "done"): "every page acknowledged",
    ("stopping", "done"): "nothing reads its pages any more",
}

# Aborts that came before their request are remembered this long (seconds), at most this many.
TOMBSTONE_S = 600.0
MAX_TOMBSTONES = 10_000

# A prefix that is being computed or sent is waited for if it saves at least this many tokens.
WAIT_FOR_PREFIX = 64


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Length of the longest common prefix of two token arrays."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


class Job(Tracked[JobState]):
    """One prompt to compute. `computed` counts tokens whose KV is in `pages`."""

    def __init__(self, request: StartPrefill, page_size: int, now: float) -> None:
        super().__init__(f"prefill of {request.attempt}", "waiting", JOB_TRANSITIONS, now)
        self.request = request
        self.tokens = unpack_ints(request.tokens)
        self.target = unpack_ints(request.pages)
        self.arrived = now
        self.deadline = now + request.timeout_s
        self.num_pages = -(-len(self.tokens) // page_size)
        self.first_page = request.resident // page_size
        self.sent = self.first_page
        self.pages: IntArray = np.empty(0, np.int32)
        self.node: Node | None = None
        self.cached = 0
        self.computed = 0
        self.published = 0  # pages of the table that the tree owns; the rest are private
        self.started = now
        self.transfers: dict[int, IntArray] = {}
        self.ending: PrefillAborted | PrefillFailed | None = None

    @property
    def attempt(self) -> AttemptId:
        return self.request.attempt

    @property
    def peer(self) -> WorkerId:
        return self.request.decode


class PrefillJobs:
    """All jobs of one worker, first come first served, computed in chunks and batched."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.jobs: OrderedDict[AttemptId, Job] = OrderedDict()
        self._tombstones: OrderedDict[AttemptId, float] = OrderedDict()
        self._next_transfer = 0
        self._transfers: dict[int, Job] = {}
        # Counters for metrics and for the accounts of the tests.
        self.computed_tokens = 0
        self.prefill_hit_tokens = 0
        self.written_pages = 0
        self.failed_transfers: dict[str, int] = {}

    # --- events ---

    def start(self, request: StartPrefill, now: float) -> list[Instruction]:
        if request.attempt in self.jobs:
            return []
        if self._tombstones.pop(request.attempt, None) is not None:
            return []  # its abort overtook it and has been answered
        out: list[Instruction] = [Connect(request.decode, request.agent, request.region)]
        job = Job(request, self.page_size, now)
        problem = self._problem(job)
        if problem:
            return [*out, Notify(job.peer, PrefillFailed(attempt=job.attempt, reason=problem))]
        self.jobs[job.attempt] = job
        return out

    def abort(self, request: AbortPrefill, now: float) -> list[Instruction]:
        job = self.jobs.get(request.attempt)
        if job is None:
            self._tombstones[request.attempt] = now
            return [Notify(request.decode, PrefillAborted(attempt=request.attempt))]
        return self._stop(job, PrefillAborted(attempt=job.attempt), now, "aborted by decode")

    def transfer_ended(self, event: TransferEnded, now: float) -> list[Instruction]:
        job = self._transfers.pop(event.transfer, None)
        if job is None:
            return []
        pages = job.transfers.pop(event.transfer)
        self.cache.pool.end_flight(pages)
        if event.error and job.state != "stopping":
            self.failed_transfers[event.error] = self.failed_transfers.get(event.error, 0) + 1
            return self._stop(
                job,
                PrefillFailed(attempt=job.attempt, reason=f"transfer failed: {event.error}"),
                now,
                "transfer failed",
            )
        if not event.error:
            self.written_pages += len(pages)
        if job.transfers or job.state == "running":
            return []
        return self._end(job, now)

    def peer_lost(self, worker: WorkerId, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for job in [job for job in self.jobs.values() if job.peer == worker]:
            failed = PrefillFailed(attempt=job.attempt, reason="decode worker lost")
            out += self._stop(job, failed, now, "decode worker lost")
        return out

    def tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for job in [job for job in self.jobs.values() if now >= job.deadline]:
            failed = PrefillFailed(attempt=job.attempt, reason=f"deadline passed while {job.state}")
            out += self._stop(job, failed, now, "deadline")
        while self._tombstones:
            attempt, since = next(iter(self._tombstones.items()))
            if len(self._tombstones) <= MAX_TOMBSTONES and now - since < TOMBSTONE_S:
                break
            del self._tombstones[attempt]
        return out

    # --- steps ---

    def plan(
        self, budget: int, now: float
    ) -> tuple[list[Row], list[tuple[int, int]], list[Instruction]]:
        """Rows of at most `budget` tokens, page copies to make before, and transfers to start
        now.
        """
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        out: list[Instruction] = []
        for job in list(self.jobs.values()):
            if budget <= 0:
                break
            if job.state == "waiting":
                if self._computed_now(job, rows, now):
                    continue
                try:
                    copies += self._admit(job, now)
                except OutOfPages as error:
                    if any(other.state != "waiting" for other in self.jobs.values()):
                        break  # first come first served: nobody overtakes; pages will come back
                    failed = PrefillFailed(attempt=job.attempt, reason=f"never fits: {error}")
                    out += self._stop(job, failed, now, "never fits")
                    continue
                out += self._send(job, job.cached // self.page_size)
            if job.state == "running":
                row = self._row(job, budget)
                budget -= len(row.tokens)
                rows.append(row)
        return rows, copies, out

    def computed_row(self, row: Row, token: int | None, now: float) -> list[Instruction]:
        """The engine has computed `row`; `token` was sampled if it was the prompt's last chunk."""
        job = self.jobs.get(row.attempt)
        self.computed_tokens += len(row.tokens)
        if job is None or job.state != "running":
            return []
        job.computed = row.end
        finished = job.computed == len(job.tokens)
        self._publish(job, now)
        if not finished:
            return self._send(job, job.computed // self.page_size)
        assert token is not None
        first = FirstToken(
            attempt=job.attempt,
            token=token,
            sources=Sources(computed=len(job.tokens) - job.cached, prefill_hit=job.cached),
            queue_s=job.started - job.arrived,
            prefill_s=now - job.started,
        )
        self.prefill_hit_tokens += job.cached
        job.move("sending", now)
        out: list[Instruction] = [Notify(job.peer, first)]
        out += self._send(job, job.num_pages)
        if not job.transfers:
            out += self._end(job, now)
        return out

    @property
    def waiting(self) -> int:
        return sum(job.state == "waiting" for job in self.jobs.values())

    @property
    def running(self) -> int:
        return len(self.jobs) - self.waiting

    @property
    def transfers_inflight(self) -> int:
        return len(self._transfers)

    def validate(self) -> None:
        for job in self.jobs.values():
            assert job.state != "done"
            assert set(job.transfers) == {t for t, j in self._transfers.items() if j is job}
            assert (job.node is None) == (job.state == "waiting")
            assert job.published * self.page_size <= job.computed or job.state == "waiting"

    # --- within ---

    def _problem(self, job: Job) -> str:
        """What is wrong with a reservation, or ""."""
        size, expected = self.page_size, job.num_pages - job.first_page
        if not len(job.tokens):
            return "bad reservation: no tokens"
        if job.request.resident % size or job.request.resident > len(job.tokens):
            return (
                f"bad reservation: resident {job.request.resident} of {len(job.tokens)} tokens"
                f" with page size {size}"
            )
        if len(job.target) != expected:
            return f"bad reservation: {len(job.target)} pages, expected {expected}"
        return ""

    def _admit(self, job: Job, now: float) -> list[tuple[int, int]]:
        """Locks what is cached and allocates the rest; raises OutOfPages and changes nothing."""
        size, total = self.page_size, len(job.tokens)
        match = self.cache.match(job.tokens, job.request.namespace, now=now, count_hit=False)
        self.cache.lock(match.node)
        whole = match.length == total
        try:
            # The last token is always computed, for its logits: where its page is published, in a
            # private copy, so that no published page is written again.
            fresh = self.cache.allocate(
                1 if whole else job.num_pages - match.length // size, now=now
            )
        except OutOfPages:
            self.cache.unlock(match.node)
            raise
        self.cache.match(job.tokens, job.request.namespace, now=now, count_hit=True)
        job.node = match.node
        copies: list[tuple[int, int]] = []
        if whole:
            job.cached = job.computed = total - 1
            job.published = job.num_pages - 1
            job.pages = np.concatenate([match.pages[:-1], fresh])
            if size > 1:
                copies.append((int(match.pages[-1]), int(fresh[0])))
        else:
            job.cached = job.computed = match.length
            job.published = match.length // size
            job.pages = np.concatenate([match.pages, fresh])
        job.started = now
        job.move("running", now)
        return copies

    def _computed_now(self, job: Job, rows: list[Row], now: float) -> bool:
        """Whether this very step computes a long prefix of the job: then it waits for one step."""
        if not rows:
            return False
        shared = 0
        for row in rows:
            other = self.jobs[row.attempt]
            if other.request.namespace == job.request.namespace:
                shared = max(shared, common_prefix(job.tokens, other.tokens[: row.end]))
        if shared < WAIT_FOR_PREFIX:
            return False
        match = self.cache.match(job.tokens, job.request.namespace, now=now, count_hit=False)
        return shared - match.length >= WAIT_FOR_PREFIX

    def _row(self, job: Job, budget: int) -> Row:
        end = min(len(job.tokens), job.computed + budget)
        return Row(
            attempt=job.attempt,
            tokens=job.tokens[job.computed : end],
            start=job.computed,
            pages=job.pages[: -(-end // self.page_size)],
            sampling=job.request.params if end == len(job.tokens) else None,
        )

    def _publish(self, job: Job, now: float) -> None:
        full = job.computed // self.page_size
        if full <= job.published:
            return
        published = self.cache.publish(
            job.tokens[: full * self.page_size],
            job.pages[:full],
            job.request.namespace,
            now=now,
            priority=job.request.priority,
        )
        job.pages = np.concatenate([published.pages, job.pages[full:]])
        job.published = published.length // self.page_size
        assert job.node is not None
        self.cache.move_lock(job.node, published.node)
        job.node = published.node

    def _send(self, job: Job, upto: int) -> list[Instruction]:
        """Writes the pages before page `upto` that decode does not have and was not yet sent."""
        if upto <= job.sent:
            return []
        source = job.pages[job.sent : upto]
        first = job.sent - job.first_page
        target = job.target[first : first + len(source)]
        transfer = self._next_transfer
        self._next_transfer += 1
        job.sent = upto
        job.transfers[transfer] = source
        self._transfers[transfer] = job
        self.cache.pool.begin_flight(source)
        done = PagesWritten(attempt=job.attempt, first=first, count=len(source))
        return [WritePages(transfer, job.peer, source, target, done)]

    def _stop(
        self, job: Job, ending: PrefillAborted | PrefillFailed, now: float, why: str
    ) -> list[Instruction]:
        """Ends a job early; decode hears `ending` once nothing of it can land any more."""
        job.ending = ending
        if job.state == "stopping":
            return []
        if job.state == "waiting":
            return self._end(job, now)
        job.move("stopping", now, why)
        if not job.transfers:
            return self._end(job, now)
        return [AbortTransfer(transfer) for transfer in job.transfers]

    def _end(self, job: Job, now: float) -> list[Instruction]:
        if job.node is not None:
            self.cache.release(job.pages[job.published :])
            self.cache.unlock(job.node)
        del self.jobs[job.attempt]
        job.move("done", now)
        return [] if job.ending is None else [Notify(job.peer, job.ending)]
