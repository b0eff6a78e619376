"""The decode role, pure: attempts from their reservation to their last token.

    seq.table   [ resident: the tree's, locked │ the reservation: in flight │ grown while decoding ]
                0                     first_page                   prompt pages
    after join  [ the prompt's full pages: the tree's, locked │ tail and answer: private           ]

A page of a reservation is in flight from the moment that prefill is told of it until all pages have
been confirmed, or prefill has said (or died so) that nothing can land any more; so are the resident
pages that prefill may read. Until then they are never freed, whatever became of the request: such a
sequence is `closing` or `draining`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from pd_cluster.cache.page_pool import OutOfPages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.draw import Draw
from pd_cluster.tombstones import Tombstones
from pd_cluster.types import (
    AbortPrefill,
    AttemptId,
    CancelAttempt,
    FinishReason,
    FirstToken,
    MakeRoom,
    Outcome,
    Output,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    PromptScores,
    Region,
    RetractionPolicy,
    Sources,
    StartAttempt,
    StartPrefill,
    TokenLogprobs,
    WorkerId,
    pack_ints,
)
from pd_cluster.worker.instructions import (
    Deliver,
    Instruction,
    PagesCorrupt,
    Row,
    Send,
    VerifyPages,
)
from pd_cluster.worker.page_table import common_prefix, freed_by
from pd_cluster.worker.prefill import WAIT_FOR_PREFIX
from pd_cluster.worker.retraction import enough, in_order
from pd_cluster.worker.sequence import HOLDING, RECEIVING, Sequence, SequenceState
from pd_cluster.worker.stages import StageTimes

# Pages that a new reservation leaves for each running sequence to grow into, in tokens.
GROWTH_TOKENS = 16


class DecodeSequences:
    """All attempts of one worker."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        worker: WorkerId,
        agent: bytes,
        region: Region,
        eos_token_ids: Iterable[int],
        max_running: int,
        keep_answers: bool = True,
        prefill_s: float,
        transfer_s: float,
        drain_s: float,
    ) -> None:
        self.cache = cache
        self.tiers = cache if isinstance(cache, TieredCache) else None
        self.page_size = cache.page_size
        self.worker = worker
        self.agent = agent
        self.region = region
        self.eos = frozenset(eos_token_ids)
        self.max_running = max_running
        # Else the tree keeps prompts only, once a request has finished.
        self.keep_answers = keep_answers
        self.prefill_s = prefill_s
        self.transfer_s = transfer_s
        self.drain_s = drain_s
        self.sequences: OrderedDict[AttemptId, Sequence] = OrderedDict()
        self._tombstones = Tombstones()
        self._ended = Tombstones()
        # Counters for metrics and for the accounts of the tests.
        self.reserved_pages = 0
        self.resident_pages = 0
        self.generated_tokens = 0
        self.corrupt_transfers = 0
        self.computed_tokens = 0
        self.decode_hit_tokens = 0
        # By policy, or "preemption" where a higher priority took the place.
        self.retractions: Counter[str] = Counter()
        self.retracted_tokens = 0
        self.stages = StageTimes()
        self.retraction_policy: RetractionPolicy = "length"  # the coordinator says which

    # --- events ---

    def start(self, request: StartAttempt, now: float) -> list[Instruction]:
        if request.attempt in self.sequences or request.attempt in self._ended:
            return []  # it comes twice
        seq = Sequence(request, self.cache, now)
        if self._tombstones.take(request.attempt):
            self._ended.add(request.attempt, now)
            seq.move("done", now, "its cancel overtook it")
            return [self._end_output(seq, "aborted", "cancelled")]
        if len(self.sequences) >= self.max_running:
            self._ended.add(request.attempt, now)
            seq.move("done", now, "refused: full")
            return [self._end_output(seq, "refused", f"{self.worker} runs {self.max_running}")]
        self.sequences[request.attempt] = seq
        return self._reserve_or_await(seq, now)

    def cancel(self, request: CancelAttempt, now: float) -> list[Instruction]:
        seq = self.sequences.get(request.attempt)
        if seq is None:
            self._tombstones.add(request.attempt, now)
            return []
        if seq.state in ("closing", "draining"):
            return []
        return self._abandon(seq, now, "cancelled")

    def gateway_lost(self, gateway: str, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for seq in [seq for seq in self.sequences.values() if seq.request.gateway == gateway]:
            out += self.cancel(CancelAttempt(attempt=seq.attempt), now)
        return out

    def pages_written(self, message: PagesWritten, now: float) -> list[Instruction]:
        seq = self._receiving(message.attempt)
        if seq is None:
            return []
        last = message.first + message.count
        if message.checksums:
            fresh = seq.in_flight[len(seq.in_flight) - len(seq.landed) :]
            return [VerifyPages(message, fresh[message.first : last].copy())]
        seq.landed[message.first : last] = True
        return self._landed(seq, now) if seq.landed.all() else []

    def pages_corrupt(self, event: PagesCorrupt, now: float) -> list[Instruction]:
        """Nothing of the reservation is used: the prompt is computed once more."""
        self.corrupt_transfers += 1
        seq = self._receiving(event.attempt)
        if seq is None or seq.state == "draining":
            return []
        why = "pages arrived corrupt"
        if seq.state == "closing":
            return self._drain(seq, now, why)
        return [self._end_output(seq, "failed", why), *self._abandon(seq, now, why)]

    def first_token(self, message: FirstToken, now: float) -> list[Instruction]:
        seq = self.sequences.get(message.attempt)
        if seq is None or seq.state != "reserved":
            return []
        out = self._emit(
            seq, message.token, message.logprobs, message.sources, message.prompt_scores
        )
        if not seq.landed.all():
            seq.deadline = min(seq.deadline, now + self.transfer_s)
            seq.move("closing" if seq.ended else "landing", now)
            return out
        self._take_in(seq, now)
        if seq.ended:
            return out + self._leave(seq, now, "finished with its first token")
        return out + self._join(seq, now)

    def prefill_failed(self, message: PrefillFailed, now: float) -> list[Instruction]:
        seq = self._receiving(message.attempt)
        return [] if seq is None else self._nothing_lands(seq, now, message.reason)

    def prefill_aborted(self, message: PrefillAborted, now: float) -> list[Instruction]:
        seq = self._receiving(message.attempt)
        return [] if seq is None else self._nothing_lands(seq, now, "prefill aborted")

    def peer_lost(self, worker: WorkerId, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for seq in list(self.sequences.values()):
            if seq.request.prefill == worker and seq.state in RECEIVING:
                out += self._nothing_lands(seq, now, f"prefill worker {worker} lost")
        return out

    def tick(self, now: float) -> list[Instruction]:
        self._tombstones.expire(now)
        self._ended.expire(now)
        out: list[Instruction] = []
        for seq in [seq for seq in self.sequences.values() if now >= seq.deadline]:
            if seq.state == "draining":
                # Prefill has not answered: ask again. The pages stay where they are until it does,
                # or is known dead.
                seq.deadline = now + self.drain_s
                out.append(self._abort_prefill(seq))
            elif seq.state == "closing":
                out += self._drain(seq, now, "pages did not come in time")
            else:
                message = f"deadline passed while {seq.state}"
                out.append(self._end_output(seq, "failed", message))
                out += self._abandon(seq, now, message)
        return out

    # --- steps ---

    def plan(self, now: float) -> tuple[list[Row], list[Instruction]]:
        """One row for each running sequence; retracts some if there are not enough pages."""
        out: list[Instruction] = []
        while True:
            running = [seq for seq in self.sequences.values() if seq.state == "running"]
            short = [seq for seq in running if seq.kv_len == seq.table.num_pages * self.page_size]
            try:
                fresh = self.cache.allocate(len(short), now=now)
                break
            except OutOfPages:
                if self.tiers is not None and self.tiers.copying_out:
                    return [], out  # pages that are being copied come back
                if len(running) > 1:
                    victim = self._victim(running, short)
                    out += self._retract(victim, self.retraction_policy, "out of KV pages", now)
                elif self._has_all(running[0]):
                    out += self._fail_too_large(running[0], now)
                else:
                    return [], out  # others' pages come back, or they become victims themselves
        for index, seq in enumerate(short):
            seq.table.grow(fresh[index : index + 1])
        return [self._row(seq, seq.length) for seq in running], out

    def make_room(self, message: MakeRoom, now: float) -> list[Instruction]:
        """Retracts what the coordinator says may go, if that makes enough room for another."""
        available = self.cache.available() * self.page_size
        if available >= message.tokens and len(self.sequences) < self.max_running:
            return []
        aside = dict(message.candidates)
        holding = [
            self.sequences[attempt]
            for attempt in aside
            if attempt in self.sequences and self.sequences[attempt].state in HOLDING
        ]
        order = in_order(self.retraction_policy, holding)
        out: list[Instruction] = []
        for victim in enough(order, message.tokens, available, aside):
            out += self._retract(victim, "preemption", "a higher priority needs its place", now)
        return out

    def give_up(self, now: float) -> list[Instruction]:
        """Retracts every attempt that has not ended, whatever it is doing."""
        out: list[Instruction] = []
        for seq in [seq for seq in self.sequences.values() if not seq.ended]:
            if seq.state != "draining":
                out += self._retract(seq, "scale_in", "its worker is to leave", now)
        return out

    def plan_local(self, budget: int, chunk: int) -> tuple[list[Row], list[tuple[int, int]]]:
        """Rows of the prompts that are computed here, `budget` tokens together and `chunk` each;
        and the page copies to make before.
        """
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        for seq in self.sequences.values():
            if seq.state == "computing" and budget > 0:
                rows.append(self._row(seq, min(seq.start_len, seq.kv_len + min(budget, chunk))))
                budget -= len(rows[-1].tokens)
                copies += seq.copies
                seq.copies = []
        return rows, copies

    def computed_row(
        self, row: Row, token: int | None, logprobs: TokenLogprobs | None, now: float
    ) -> list[Instruction]:
        """The engine has computed `row`; `token` was sampled if the row asked for one."""
        seq = self.sequences.get(row.attempt)
        if seq is None or seq.state not in ("running", "computing"):
            return []
        local = seq.state == "computing"
        seq.kv_len = row.end
        if local:
            self.computed_tokens += len(row.tokens)
            self._publish(seq, now)
        if row.draw is None:
            return []
        assert token is not None
        sources = None
        if local:
            cached = min(seq.resident, seq.start_len - 1)
            disk = min(cached, seq.disk_hit)
            host = min(cached - disk, seq.host_hit)
            sources = Sources(
                computed=seq.start_len - cached,
                disk_hit=disk,
                host_hit=host,
                decode_hit=cached - disk - host,
            )
            self.decode_hit_tokens += cached
        out = self._emit(seq, token, logprobs, sources)
        if seq.ended:
            return out + self._leave(seq, now, "finished")
        return out + self._join(seq, now) if local else out

    def count(self, *states: SequenceState) -> int:
        return sum(seq.state in states for seq in self.sequences.values())

    def validate(self) -> None:
        for seq in self.sequences.values():
            assert seq.state != "done"
            assert seq.table.is_open == (seq.state != "awaiting")
            assert seq.kv_len <= seq.table.num_pages * self.page_size
            assert not len(seq.in_flight) or seq.state in RECEIVING
            if seq.state == "running":
                assert seq.length == seq.kv_len + 1
            if seq.awaits is not None:
                assert seq.state == "awaiting"
                assert seq.awaits in self.sequences

    # --- within ---

    def _receiving(self, attempt: AttemptId) -> Sequence | None:
        """The sequence, if pages of it may be in flight; messages for any other are too late."""
        seq = self.sequences.get(attempt)
        return seq if seq is not None and seq.state in RECEIVING else None

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        params, token = seq.request.params, int(seq.tokens[-1])
        if token in params.stop_token_ids or (token in self.eos and not params.ignore_eos):
            return "stop"
        return "length" if seq.num_output >= params.max_tokens else None

    def _row(self, seq: Sequence, end: int) -> Row:
        request, draw = seq.request, None
        if end == seq.length:
            draw = Draw.of(
                request.params, request.sequence, seq.tokens, request.prompt_len, self.eos
            )
        return Row(
            attempt=seq.attempt,
            tokens=seq.tokens[seq.kv_len : end],
            start=seq.kv_len,
            pages=seq.table.pages[: -(-end // self.page_size)],
            draw=draw,
        )

    def _emit(
        self,
        seq: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        sources: Sources | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> list[Instruction]:
        """Takes a token into the sequence and tells the gateway; `seq.ended` if it was the last."""
        seq.append(token)
        self.generated_tokens += 1
        finish = self._finish_reason(seq)
        seq.ended = seq.finished = finish is not None
        output = Output(
            attempt=seq.attempt,
            number=seq.next_output(),
            tokens=(token,),
            outcome="finished" if finish else None,
            finish_reason=finish,
            resident=seq.resident,
            sources=sources,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_scores=prompt_scores,
        )
        return [Deliver(seq.request.gateway, output)]

    def _reserve_or_await(self, seq: Sequence, now: float) -> list[Instruction]:
        """Reserves, unless a long part of the prompt, or all, is on its way here already."""
        namespace, start = seq.request.namespace, seq.start
        match = self.cache.match(start, namespace, now=now, count_hit=False)
        for other in self.sequences.values():
            if other.state not in ("computing", "reserved", "landing", "closing"):
                continue
            if other.request.namespace != namespace:
                continue
            shared = common_prefix(start, other.start)
            saves = shared - match.length
            if saves >= WAIT_FOR_PREFIX or (shared == len(start) and saves >= self.page_size):
                seq.awaits = other.attempt
                return []
        seq.awaits = None
        if not self._promoted(seq, now):
            return []
        return self._reserve(seq, now)

    def promoted(self, now: float) -> list[Instruction]:
        """Something has come up from lower tiers, or time has passed: who waited may reserve."""
        out: list[Instruction] = []
        for seq in list(self.sequences.values()):
            if seq.state == "awaiting" and seq.awaits is None:
                out += self._reserve_or_await(seq, now)
        return out

    def _promoted(self, seq: Sequence, now: float) -> bool:
        """Whether all is here that the sequence waits for from lower tiers."""
        if self.tiers is None or not seq.request.promote:
            return True
        if not seq.looked_below:
            seq.looked_below = True
            seq.promotion = self.tiers.promote(seq.start, seq.request.namespace, now=now)
        return seq.promotion is None or self.tiers.ready(seq.promotion, now)

    def _settle(self, seq: Sequence) -> None:
        """What came up from lower tiers for a sequence is its own now, or not wanted."""
        if self.tiers is None or seq.promotion is None:
            return
        seq.disk_hit, seq.host_hit = seq.promotion.storage_tokens, seq.promotion.host_tokens
        self.tiers.settle(seq.promotion)
        seq.promotion = None

    def _reserve(self, seq: Sequence, now: float) -> list[Instruction]:
        local = seq.route == "local"
        growing = self.count("computing", "reserved", "landing", "running")
        try:
            cached, copies = seq.table.claim(
                seq.start,
                seq.request.namespace,
                now=now,
                compute_last=local,
                spare=-(-GROWTH_TOKENS // self.page_size) * growing,
            )
        except OutOfPages as error:
            if self.tiers is not None and not self.tiers.idle:
                return []  # pages that are being copied come back
            self._settle(seq)
            del self.sequences[seq.attempt]
            self._ended.add(seq.attempt, now)
            seq.move("done", now, "refused: no pages")
            return [self._end_output(seq, "refused", str(error))]
        seq.resident = cached
        self._settle(seq)
        first = seq.table.published
        self.resident_pages += first
        if local:
            seq.copies = copies
            seq.kv_len = cached
            seq.move("computing", now)
            return []
        return self._ask_prefill(seq, first, now)

    def _ask_prefill(self, seq: Sequence, first: int, now: float) -> list[Instruction]:
        """Hands prefill the reservation: the pages from page `first` on, and those before to read
        from if that is the route."""
        request, pages = seq.request, seq.table.pages
        fresh = pages[first:]
        held = pages[:first] if seq.route == "remote+pull" else pages[:0]
        seq.landed = np.zeros(len(fresh), np.bool_)
        seq.in_flight = np.concatenate([held, fresh])
        self.cache.pool.begin_flight(seq.in_flight)
        self.reserved_pages += len(fresh)
        seq.move("reserved", now)
        message = StartPrefill(
            attempt=seq.attempt,
            decode=self.worker,
            agent=self.agent,
            region=self.region,
            tokens=pack_ints(seq.start),
            params=request.params,
            resident=seq.resident,
            pages=pack_ints(fresh),
            prompt_len=request.prompt_len,
            timeout_s=min(self.prefill_s, max(0.0, seq.deadline - now)),
            held=pack_ints(held),
            sequence=request.sequence,
            namespace=request.namespace,
            priority=request.priority,
        )
        return [Send(request.prefill, message)]

    def _landed(self, seq: Sequence, now: float) -> list[Instruction]:
        """The last page of the reservation is here."""
        if seq.state == "reserved":
            return []  # the first token is still to come
        self._take_in(seq, now)
        if seq.state == "landing":
            return self._join(seq, now)
        return self._leave(seq, now, "all pages are here")  # they are good for others

    def _join(self, seq: Sequence, now: float) -> list[Instruction]:
        seq.deadline = seq.request_deadline
        seq.move("running", now)
        return self._wake(seq, now)

    def _take_in(self, seq: Sequence, now: float) -> None:
        """All pages of the prompt are here: they end their flight and enter the tree."""
        self._end_flight(seq)
        seq.kv_len = seq.start_len
        self._publish(seq, now)

    def _end_flight(self, seq: Sequence) -> None:
        self.cache.pool.end_flight(seq.in_flight)
        seq.in_flight = seq.in_flight[:0]

    def _publish(self, seq: Sequence, now: float) -> None:
        request = seq.request
        end = seq.kv_len
        if seq.finished and not self.keep_answers:
            end = min(end, request.prompt_len)
        tokens = seq.tokens[:end]
        seq.table.publish(tokens, request.namespace, now=now, priority=request.priority)

    def _victim(self, running: list[Sequence], short: list[Sequence]) -> Sequence:
        """The first in the policy's order whose leaving helps: whose pages are not all shared, or
        who needs one itself.
        """
        return next(
            seq
            for seq in in_order(self.retraction_policy, running)
            if seq in short or freed_by([seq.table])
        )

    def _retract(self, seq: Sequence, cause: str, why: str, now: float) -> list[Instruction]:
        self.retractions[cause] += 1
        self.retracted_tokens += seq.kv_len
        told = self._end_output(seq, "retracted", why)
        return [told, *self._abandon(seq, now, f"retracted: {why}")]

    def _has_all(self, seq: Sequence) -> bool:
        """Whether nobody else holds a page of the pool."""
        return self.cache.available() + freed_by([seq.table]) == self.cache.pool.num_pages

    def _fail_too_large(self, seq: Sequence, now: float) -> list[Instruction]:
        tokens = self.cache.pool.num_pages * self.page_size
        message = f"{seq.length} tokens do not fit into the {tokens} of {self.worker}, even alone"
        return [self._end_output(seq, "failed", message), *self._leave(seq, now, message)]

    def _abandon(self, seq: Sequence, now: float, why: str) -> list[Instruction]:
        """Ends a sequence whose client wants no more of it."""
        if seq.state in ("reserved", "landing"):
            return self._drain(seq, now, why)
        return self._leave(seq, now, why)

    def _drain(self, seq: Sequence, now: float, why: str) -> list[Instruction]:
        seq.move("draining", now, why)
        seq.deadline = now + self.drain_s
        return [self._abort_prefill(seq), *self._wake(seq, now)]

    def _abort_prefill(self, seq: Sequence) -> Instruction:
        abort = AbortPrefill(attempt=seq.attempt, decode=self.worker)
        return Send(seq.request.prefill, abort)

    def _nothing_lands(self, seq: Sequence, now: float, why: str) -> list[Instruction]:
        """Prefill said, or died so, that nothing more of the reservation can land."""
        out: list[Instruction] = []
        if seq.state in ("reserved", "landing"):
            out.append(self._end_output(seq, "failed", why))
        self._end_flight(seq)
        return out + self._leave(seq, now, why)

    def _leave(self, seq: Sequence, now: float, why: str) -> list[Instruction]:
        """Gives back all that the sequence holds; what it computed stays in the tree."""
        self._settle(seq)
        if seq.table.is_open:
            self._publish(seq, now)
            seq.table.close()
        del self.sequences[seq.attempt]
        self._ended.add(seq.attempt, now)
        seq.move("done", now, why)
        self.stages.take(seq.story, finished=seq.finished)
        told = [] if seq.ended else [self._end_output(seq, "aborted", why)]
        return told + self._wake(seq, now)

    def _wake(self, seq: Sequence, now: float) -> list[Instruction]:
        """Those that waited for this sequence's prompt reserve now, in order of arrival."""
        out: list[Instruction] = []
        for other in list(self.sequences.values()):
            if other.awaits == seq.attempt:
                out += self._reserve_or_await(other, now)
        return out

    def _end_output(self, seq: Sequence, outcome: Outcome, message: str) -> Instruction:
        seq.ended = True
        output = Output(
            attempt=seq.attempt,
            number=seq.next_output(),
            outcome=outcome,
            message=message,
            resident=seq.resident,
        )
        return Deliver(seq.request.gateway, output)
