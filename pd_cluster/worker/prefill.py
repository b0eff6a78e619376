"""The prefill role, pure: jobs that compute prompts and push their pages into decode's memory.

    job's table  [ matched: the tree's │ pulled │ computed, published │ not yet computed: private ]
                 0                   cached                                                 total
    decode       [ resident there: never sent, may be pulled │ the reservation: written by chunks ]

The job's table is closed only when all its transfers are over: so no page that a peer reads from or
writes to can be evicted. A private page that turns out to be a duplicate when published is released
by the cache, which keeps it out of use while a transfer still touches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

from pd_cluster.cache.page_pool import OutOfPages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_books import Promotion
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.draw import Draw, Known, Scores, pack_scores
from pd_cluster.states import Tracked, Transitions
from pd_cluster.tombstones import Tombstones
from pd_cluster.types import (
    CHECKSUM_BYTES,
    AbortPrefill,
    AttemptId,
    FirstToken,
    IntArray,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Sources,
    StartPrefill,
    TokenLogprobs,
    WorkerId,
    unpack_ints,
)
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Connect,
    Instruction,
    Notify,
    ReadPages,
    Row,
    TransferEnded,
    WritePages,
)
from pd_cluster.worker.page_table import PageTable, common_prefix

JobState = Literal["waiting", "pulling", "running", "sending", "stopping", "done"]

JOB_TRANSITIONS: Transitions[JobState] = {
    ("waiting", "pulling"): "pages allocated, reading from decode",
    ("waiting", "running"): "pages allocated",
    ("waiting", "done"): "stopped before it began",
    ("pulling", "running"): "what decode held is here",
    ("pulling", "stopping"): "aborted or failed",
    ("running", "sending"): "first token sampled",
    ("running", "stopping"): "aborted or failed",
    ("sending", "stopping"): "aborted or failed",
    ("sending", "done"): "every page acknowledged",
    ("stopping", "done"): "nothing touches its pages any more",
}

# Prompt tokens of a step whose logits are all wanted: each takes 4 bytes times the vocabulary.
SCORED_TOKENS = 256

# A shared prefix of at least this many tokens is waited for: on prefill while it is computed, on
# decode if it saves so many.
WAIT_FOR_PREFIX = 64


class Job(Tracked[JobState]):
    """One prompt to compute. The KV of the first `computed` tokens is in the table's pages."""

    def __init__(self, request: StartPrefill, cache: PrefixCache, now: float) -> None:
        super().__init__(f"prefill of {request.attempt}", "waiting", JOB_TRANSITIONS, now)
        self.request = request
        self.tokens = unpack_ints(request.tokens)
        self.target = unpack_ints(request.pages)
        self.held = unpack_ints(request.held)
        self.table = PageTable(cache)
        self.arrived = self.started = now
        self.deadline = now + request.timeout_s
        self.num_pages = -(-len(self.tokens) // cache.page_size)
        self.first_page = request.resident // cache.page_size
        self.sent = self.first_page
        self.cached = self.pulled = self.computed = 0
        self.promotion: Promotion | None = None  # what of it comes up from lower tiers
        self.host_hit = self.disk_hit = 0  # of `cached`
        # All of a prompt's logprobs need all of it computed: then nothing is taken from caches.
        self.is_scored = request.params.prompt_logprobs >= 0 and (
            request.prompt_len == len(self.tokens)
        )
        self.scores: list[Scores] = []
        self.transfers: dict[int, IntArray] = {}
        self.ending: PrefillAborted | PrefillFailed | None = None

    @property
    def attempt(self) -> AttemptId:
        return self.request.attempt

    @property
    def peer(self) -> WorkerId:
        return self.request.decode

    @property
    def sources(self) -> Sources:
        computed = len(self.tokens) - self.cached - self.pulled
        return Sources(
            computed=computed,
            pulled=self.pulled,
            disk_hit=self.disk_hit,
            host_hit=self.host_hit,
            prefill_hit=self.cached - self.disk_hit - self.host_hit,
        )


class PrefillJobs:
    """All jobs of one worker, first come first served, computed in chunks and batched."""

    def __init__(self, cache: PrefixCache, eos_token_ids: Iterable[int] = ()) -> None:
        self.cache = cache
        self.tiers = cache if isinstance(cache, TieredCache) else None
        self.page_size = cache.page_size
        self.eos = frozenset(eos_token_ids)
        self.jobs: OrderedDict[AttemptId, Job] = OrderedDict()
        self._tombstones = Tombstones()
        self._ended = Tombstones()
        self._next_transfer = 0
        self._transfers: dict[int, Job] = {}
        # Counters for metrics and for the accounts of the tests.
        self.computed_tokens = 0
        self.prefill_hit_tokens = 0
        self.pulled_tokens = 0
        self.written_pages = 0
        self.failed_transfers: dict[str, int] = {}

    # --- events ---

    def start(self, request: StartPrefill, now: float) -> list[Instruction]:
        if request.attempt in self.jobs or request.attempt in self._ended:
            return []  # it comes twice
        if self._tombstones.take(request.attempt):
            return []  # its abort overtook it and has been answered
        out: list[Instruction] = [Connect(request.decode, request.agent, request.region)]
        job = Job(request, self.cache, now)
        problem = self._problem(job)
        if problem:
            return [*out, Notify(job.peer, PrefillFailed(attempt=job.attempt, reason=problem))]
        self.jobs[job.attempt] = job
        if self.tiers is not None and not job.is_scored:
            job.promotion = self.tiers.promote(job.tokens, request.namespace, now=now)
        return out

    def abort(self, request: AbortPrefill, now: float) -> list[Instruction]:
        job = self.jobs.get(request.attempt)
        if job is None:
            self._tombstones.add(request.attempt, now)
            return [Notify(request.decode, PrefillAborted(attempt=request.attempt))]
        return self._stop(job, PrefillAborted(attempt=job.attempt), now, "aborted by decode")

    def transfer_ended(self, event: TransferEnded, now: float) -> list[Instruction]:
        job = self._transfers.pop(event.transfer, None)
        if job is None:
            return []
        pages = job.transfers.pop(event.transfer)
        self.cache.pool.end_flight(pages)
        if job.state == "pulling":
            return self._pulled(job, len(pages), event.error, now)
        if event.error and job.state != "stopping":
            self.failed_transfers[event.error] = self.failed_transfers.get(event.error, 0) + 1
            reason = f"transfer failed: {event.error}"
            failed = PrefillFailed(attempt=job.attempt, reason=reason)
            return self._stop(job, failed, now, reason)
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

    def give_up(self, now: float) -> list[Instruction]:
        """Stops every job; decode's attempts fail and are tried again elsewhere."""
        out: list[Instruction] = []
        for job in [job for job in self.jobs.values() if job.state != "stopping"]:
            failed = PrefillFailed(attempt=job.attempt, reason="its worker is to leave")
            out += self._stop(job, failed, now, "its worker is to leave")
        return out

    def tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for job in [job for job in self.jobs.values() if now >= job.deadline]:
            failed = PrefillFailed(attempt=job.attempt, reason=f"deadline passed while {job.state}")
            out += self._stop(job, failed, now, "deadline")
        self._tombstones.expire(now)
        self._ended.expire(now)
        return out

    # --- steps ---

    def plan(
        self, budget: int, now: float, chunk: int
    ) -> tuple[list[Row], list[tuple[int, int]], list[Instruction]]:
        """Rows of at most `budget` tokens together and `chunk` each, page copies to make before,
        transfers to start now.
        """
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        out: list[Instruction] = []
        scored = SCORED_TOKENS
        full = False
        for job in list(self.jobs.values()):
            if budget <= 0:
                break
            if job.state == "waiting":
                if full or self._computed_now(job, now) or not self._promoted(job, now):
                    continue
                try:
                    more, started = self._admit(job, now)
                except OutOfPages as error:
                    # First come first served: nobody overtakes one that lacks pages. But who began
                    # while it waited for a prefix goes on: those are the pages that will come back.
                    if any(other.state != "waiting" for other in self.jobs.values()):
                        full = True
                        continue
                    if self._let_go(job):
                        break
                    failed = PrefillFailed(attempt=job.attempt, reason=f"never fits: {error}")
                    out += self._stop(job, failed, now, "never fits")
                    continue
                copies += more
                out += started
            room = min(budget, chunk, scored) if job.is_scored else min(budget, chunk)
            if job.state == "running" and room:
                row = self._row(job, room)
                budget -= len(row.tokens)
                scored -= len(row.tokens) if job.is_scored else 0
                rows.append(row)
        return rows, copies, out

    def computed_row(
        self,
        row: Row,
        token: int | None,
        logprobs: TokenLogprobs | None,
        now: float,
        scores: Scores | None = None,
    ) -> list[Instruction]:
        """The engine has computed `row`; `token` was sampled if it was the prompt's last chunk."""
        job = self.jobs.get(row.attempt)
        self.computed_tokens += len(row.tokens)
        if job is None or job.state != "running":
            return []
        job.computed = row.end
        if scores is not None:
            job.scores.append(scores)
        self._publish(job, now)
        if job.computed < len(job.tokens):
            return self._send(job, job.computed // self.page_size)
        assert token is not None
        first = FirstToken(
            attempt=job.attempt,
            token=token,
            sources=job.sources,
            queue_s=job.started - job.arrived,
            prefill_s=now - job.started,
            logprobs=logprobs,
            prompt_scores=pack_scores(job.scores) if job.is_scored else None,
        )
        self.prefill_hit_tokens += job.cached
        self.pulled_tokens += job.pulled
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
    def computing(self) -> int:
        """Prompts that are not computed yet."""
        return sum(job.state in ("waiting", "pulling", "running") for job in self.jobs.values())

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
            assert job.table.is_open == (job.state != "waiting")
            assert job.table.published * self.page_size <= job.computed
            if job.state == "pulling":
                assert len(job.transfers) == 1

    # --- within ---

    def _problem(self, job: Job) -> str:
        """What is wrong with a reservation, or ""."""
        size, resident, total = self.page_size, job.request.resident, len(job.tokens)
        expected = job.num_pages - job.first_page
        if not total:
            return "bad reservation: no tokens"
        if resident % size or not 0 <= resident <= total:
            return f"bad reservation: resident {resident} of {total} tokens with page size {size}"
        if len(job.target) != expected:
            return f"bad reservation: {len(job.target)} pages, expected {expected}"
        if len(job.held) not in (0, job.first_page):
            return f"bad reservation: {len(job.held)} pages held, expected {job.first_page}"
        return ""

    def _admit(self, job: Job, now: float) -> tuple[list[tuple[int, int]], list[Instruction]]:
        """Locks what is cached, allocates the rest, and starts what can be moved at once.

        Raises OutOfPages, with nothing changed.
        """
        job.cached, copies = job.table.claim(
            job.tokens,
            job.request.namespace,
            now=now,
            compute_last=True,
            compute_all=job.is_scored,
        )
        job.computed = job.cached
        job.started = now
        self._settle(job)
        out = self._pull(job, now)
        if out:
            return copies, out
        job.move("running", now)
        return copies, self._send(job, job.cached // self.page_size)

    def _promoted(self, job: Job, now: float) -> bool:
        """Whether all is here that the job waits for from lower tiers; others go on meanwhile."""
        if self.tiers is None or job.promotion is None:
            return True
        return self.tiers.ready(job.promotion, now)

    def _settle(self, job: Job) -> None:
        """What came up from lower tiers for a job is its own now, or not wanted."""
        if self.tiers is None or job.promotion is None:
            return
        job.disk_hit = min(job.cached, job.promotion.storage_tokens)
        job.host_hit = min(job.cached - job.disk_hit, job.promotion.host_tokens)
        self.tiers.settle(job.promotion)
        job.promotion = None

    def _let_go(self, first: Job) -> bool:
        """Gives up what waiting jobs hold, so that the first finds pages: whether it may now."""
        if self.tiers is None:
            return False
        held = [job for job in self.jobs.values() if job is not first and job.promotion is not None]
        for job in held:
            self._settle(job)
        return bool(held) or not self.tiers.idle

    def _pull(self, job: Job, now: float) -> list[Instruction]:
        """Reads what decode holds and this worker lacks; all but the page of the last token."""
        first = job.cached // self.page_size
        last = min(len(job.held), (len(job.tokens) - 1) // self.page_size)
        if last <= first or job.is_scored:
            return []
        job.move("pulling", now)
        pages = job.table.pages[first:last]
        transfer = self._begin_transfer(job, pages)
        checksums = job.request.held_checksums[first * CHECKSUM_BYTES : last * CHECKSUM_BYTES]
        return [ReadPages(transfer, job.peer, job.held[first:last], pages, job.attempt, checksums)]

    def _pulled(self, job: Job, num_pages: int, error: str, now: float) -> list[Instruction]:
        """The read is over. Where it failed, the tokens are computed instead."""
        if error:
            self.failed_transfers[error] = self.failed_transfers.get(error, 0) + 1
        else:
            job.pulled = (job.cached // self.page_size + num_pages) * self.page_size - job.cached
            job.computed = job.cached + job.pulled
            self._publish(job, now)
        job.move("running", now, error and f"read failed: {error}")
        return self._send(job, job.computed // self.page_size)

    def _computed_now(self, job: Job, now: float) -> bool:
        """Whether a long prefix of the job is being computed: then it waits until that part is."""
        if job.is_scored:
            return False  # it computes that part itself
        shared = 0
        for other in self.jobs.values():
            if other.state not in ("pulling", "running"):
                continue
            if other.request.namespace == job.request.namespace:
                shared = max(shared, common_prefix(job.tokens, other.tokens))
        if shared < WAIT_FOR_PREFIX and shared < len(job.tokens):
            return False
        match = self.cache.match(job.tokens, job.request.namespace, now=now, count_hit=False)
        # Only whole pages are there to be found.
        return shared // self.page_size * self.page_size > match.length

    def _row(self, job: Job, budget: int) -> Row:
        request = job.request
        end = min(len(job.tokens), job.computed + budget)
        draw = None
        if end == len(job.tokens):
            draw = Draw.of(
                request.params, request.sequence, job.tokens, request.prompt_len, self.eos
            )
        return Row(
            attempt=job.attempt,
            tokens=job.tokens[job.computed : end],
            start=job.computed,
            pages=job.table.pages[: -(-end // self.page_size)],
            draw=draw,
            known=self._known(job, end),
        )

    def _known(self, job: Job, end: int) -> Known | None:
        """The tokens that follow those of a row that ends at `end`."""
        if not job.is_scored:
            return None
        return Known(job.tokens[job.computed + 1 : end + 1], job.request.params.prompt_logprobs)

    def _publish(self, job: Job, now: float) -> None:
        request = job.request
        tokens = job.tokens[: job.computed]
        job.table.publish(tokens, request.namespace, now=now, priority=request.priority)

    def _send(self, job: Job, upto: int) -> list[Instruction]:
        """Writes the pages before page `upto` that decode does not have and was not yet sent."""
        if upto <= job.sent:
            return []
        source = job.table.pages[job.sent : upto].copy()
        first = job.sent - job.first_page
        job.sent = upto
        transfer = self._begin_transfer(job, source)
        done = PagesWritten(attempt=job.attempt, first=first, count=len(source))
        target = job.target[first : first + len(source)]
        return [WritePages(transfer, job.peer, source, target, done)]

    def _begin_transfer(self, job: Job, pages: IntArray) -> int:
        transfer = self._next_transfer
        self._next_transfer += 1
        job.transfers[transfer] = pages.copy()
        self._transfers[transfer] = job
        self.cache.pool.begin_flight(pages)
        return transfer

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
        self._settle(job)
        job.table.close()
        del self.jobs[job.attempt]
        self._ended.add(job.attempt, now)
        job.move("done", now)
        return [] if job.ending is None else [Notify(job.peer, job.ending)]
