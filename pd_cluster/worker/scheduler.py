"""The worker's decisions, pure: events go in, instructions come out, and steps are planned.

One prefix cache serves both roles, and one step may mix them; a worker's role only says what it is
sent. The shell around it owns the clock, the engine, the transport and the calls to other
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_ops import TierEvent, TierOp
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.draw import Drawn
from pd_cluster.types import (
    AbortPrefill,
    CancelAttempt,
    FirstToken,
    MakeRoom,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Region,
    StartAttempt,
    StartPrefill,
    WorkerId,
)
from pd_cluster.worker.decode import DecodeSequences
from pd_cluster.worker.gathering import Gathering
from pd_cluster.worker.instructions import (
    CORRUPT,
    Batch,
    Event,
    GatewayLost,
    Instruction,
    Notify,
    PagesCorrupt,
    PeerLost,
    TransferEnded,
)
from pd_cluster.worker.prefill import PrefillJobs

# Steps of fewer prompt tokens than this are not taken as a measure of how fast they are computed.
MEASURED_TOKENS = 32
# What only adds to the work: it takes nothing away that a step uses which is being computed, so it
# is handled meanwhile. All else waits for the step's end, and what came after it too.
ADDING = (StartAttempt, StartPrefill, PagesWritten, FirstToken)


class WorkerScheduler:
    """Both roles of one worker over one prefix cache. All times are seconds of one clock."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        worker: WorkerId,
        agent: bytes,
        region: Region,
        eos_token_ids: Iterable[int],
        max_running: int,
        chunk_tokens: int,
        step_tokens: int | None = None,
        local_tokens: int,
        keep_answers: bool = True,
        gather: bool = False,
        prefill_s: float,
        transfer_s: float,
        drain_s: float,
    ) -> None:
        self.cache = cache
        self.gathering = Gathering() if gather else None
        self._begins = False  # whether the step that is being computed is the first of its prompts
        self.tiers = cache if isinstance(cache, TieredCache) else None
        self.worker = worker
        self._planned = 0.0
        # Prompt tokens of a step: of one prompt, and of all of them.
        self.chunk_tokens = chunk_tokens
        self.step_tokens = step_tokens or chunk_tokens
        self.local_tokens = local_tokens
        self.prefill = PrefillJobs(cache, eos_token_ids)
        self.decode = DecodeSequences(
            cache,
            worker=worker,
            agent=agent,
            region=region,
            eos_token_ids=eos_token_ids,
            max_running=max_running,
            keep_answers=keep_answers,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            drain_s=drain_s,
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case StartAttempt():
                return self.decode.start(event, now)
            case MakeRoom():
                return self.decode.make_room(event, now)
            case CancelAttempt():
                return self.decode.cancel(event, now)
            case StartPrefill():
                if self.gathering is not None:
                    idle = not self.prefill.computing and not self.decode.count("running")
                    self.gathering.arrived(now, idle=idle)
                return self.prefill.start(event, now)
            case AbortPrefill():
                return self.prefill.abort(event, now)
            case PagesWritten():
                return self.decode.pages_written(event, now)
            case FirstToken():
                self._measure(event.sources.computed, event.prefill_s)
                return self.decode.first_token(event, now)
            case PrefillFailed():
                return self.decode.prefill_failed(event, now)
            case PrefillAborted():
                return self.decode.prefill_aborted(event, now)
            case PagesCorrupt():
                return self.decode.pages_corrupt(event, now)
            case TransferEnded():
                return self.prefill.transfer_ended(event, now)
            case TierEvent():
                assert self.tiers is not None
                self.tiers.tier_event(event, now)
                return self.decode.promoted(now)
            case PeerLost():
                lost = self.prefill.peer_lost(event.worker, now)
                return lost + self.decode.peer_lost(event.worker, now)
            case GatewayLost():
                return self.decode.gateway_lost(event.gateway, now)

    def tick(self, now: float) -> list[Instruction]:
        """Enforces deadlines; to be called at least every second or so."""
        return self.prefill.tick(now) + self.decode.tick(now) + self.decode.promoted(now)

    def give_up(self, now: float) -> list[Instruction]:
        """Sends all work away, to be done by others: this worker is to leave."""
        return self.prefill.give_up(now) + self.decode.give_up(now)

    def take_tier_ops(self) -> list[TierOp]:
        """Copies to be started now, those that say so made, before any instruction is obeyed."""
        return [] if self.tiers is None else self.tiers.take_ops()

    def plan(self, now: float) -> tuple[Batch | None, list[Instruction]]:
        """The next step, or None when nothing can be computed now; and what to start beside it.

        Where prompts are waited for, `resume_at` says until when at most.
        """
        self._planned = now
        decode, out = self.decode.plan(now)
        # Running sequences wait for a whole step: with them in it, a local prompt comes in slices.
        local_budget = self.local_tokens if decode else self.step_tokens
        local, local_copies = self.decode.plan_local(local_budget, self.chunk_tokens)
        budget = self.step_tokens - sum(len(row.tokens) for row in local)
        if not decode and not local and self._gathers(now):
            return None, out
        prefill, copies, more = self.prefill.plan(budget, now, self.chunk_tokens)
        self._begins = self._begins and bool(prefill)
        rows = local + prefill
        batch = Batch(decode, rows, local_copies + copies) if decode or rows else None
        return batch, out + more

    def computed(self, batch: Batch, drawn: list[Drawn], now: float) -> list[Instruction]:
        """The engine has run `batch`; `drawn` has one entry for each row that asked. Since it was
        planned, no event was handled but those that are ADDING.
        """
        self._measure(sum(len(row.tokens) for row in batch.prefill), now - self._planned)
        if self._begins and self.gathering is not None:
            self.gathering.ended(now - self._planned)
            self._begins = False
        out: list[Instruction] = []
        tokens = iter(drawn)
        for row in batch.rows:
            token, logprobs, scores = next(tokens) if row.asks else (None, None, None)
            if row.attempt in self.decode.sequences:
                out += self.decode.computed_row(row, token, logprobs, now)
            else:
                out += self.prefill.computed_row(row, token, logprobs, now, scores)
        # First tokens before pages: nobody waits for the bytes of those that came before.
        out.sort(key=lambda instruction: not isinstance(instruction, Notify))
        return out

    @property
    def resume_at(self) -> float:
        """When to plan again though nothing happens before; 0 where nobody is waited for."""
        return 0.0 if self.gathering is None else self.gathering.begin_at()

    def _gathers(self, now: float) -> bool:
        """Whether the prompts that are here wait for others."""
        if self.gathering is None or not self.prefill.waiting:
            return False
        if self.prefill.waiting < self.prefill.computing:
            return False  # some are being computed
        self._begins = now >= self.gathering.begin_at()
        return not self._begins

    def failed_transfers(self) -> dict[str, int]:
        """How many failed so far, by reason."""
        failed = Counter(self.prefill.failed_transfers)
        failed[CORRUPT] += self.decode.corrupt_transfers
        return dict(+failed)

    @property
    def idle(self) -> bool:
        copying = self.tiers is not None and not self.tiers.idle
        return not self.prefill.jobs and not self.decode.sequences and not copying

    def _measure(self, tokens: int, seconds: float) -> None:
        """How fast prompts are computed; a few tokens say little about many."""
        if self.tiers is not None and tokens >= MEASURED_TOKENS:
            self.tiers.compute_rate.observe(tokens, seconds)

    def validate(self) -> None:
        """Checks every invariant that can be seen from here; O(pages + nodes)."""
        self.cache.validate()
        self.prefill.validate()
        self.decode.validate()
        if self.idle:
            counts = self.cache.counts()
            assert counts.private == counts.in_flight == counts.protected == 0, counts
