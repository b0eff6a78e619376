"""The worker's decisions, pure: events go in, instructions come out, and steps are planned.

One prefix cache serves both roles, and one step may mix them; a worker's role only says what it is
sent. The shell around it owns the clock, the engine, the transport and the calls to other
processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.draw import Drawn
from pd_cluster.types import (
    AbortPrefill,
    CancelAttempt,
    FirstToken,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Region,
    StartAttempt,
    StartPrefill,
    WorkerId,
)
from pd_cluster.worker.decode import DecodeSequences
from pd_cluster.worker.instructions import (
    Batch,
    Event,
    GatewayLost,
    Instruction,
    PeerLost,
    TransferEnded,
)
from pd_cluster.worker.prefill import PrefillJobs


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
        local_tokens: int,
        prefill_s: float,
        transfer_s: float,
        drain_s: float,
    ) -> None:
        self.cache = cache
        self.worker = worker
        self.chunk_tokens = chunk_tokens
        self.local_tokens = local_tokens
        self.prefill = PrefillJobs(cache, eos_token_ids)
        self.decode = DecodeSequences(
            cache,
            worker=worker,
            agent=agent,
            region=region,
            eos_token_ids=eos_token_ids,
            max_running=max_running,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            drain_s=drain_s,
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case StartAttempt():
                return self.decode.start(event, now)
            case CancelAttempt():
                return self.decode.cancel(event, now)
            case StartPrefill():
                return self.prefill.start(event, now)
            case AbortPrefill():
                return self.prefill.abort(event, now)
            case PagesWritten():
                return self.decode.pages_written(event, now)
            case FirstToken():
                return self.decode.first_token(event, now)
            case PrefillFailed():
                return self.decode.prefill_failed(event, now)
            case PrefillAborted():
                return self.decode.prefill_aborted(event, now)
            case TransferEnded():
                return self.prefill.transfer_ended(event, now)
            case PeerLost():
                lost = self.prefill.peer_lost(event.worker, now)
                return lost + self.decode.peer_lost(event.worker, now)
            case GatewayLost():
                return self.decode.gateway_lost(event.gateway, now)

    def tick(self, now: float) -> list[Instruction]:
        """Enforces deadlines; to be called at least every second or so."""
        return self.prefill.tick(now) + self.decode.tick(now)

    def plan(self, now: float) -> tuple[Batch | None, list[Instruction]]:
        """The next step, or None when nothing can be computed now; and what to start beside it."""
        decode, out = self.decode.plan(now)
        # Running sequences wait for a whole step: with them in it, a local prompt comes in slices.
        local = self.decode.plan_local(self.local_tokens if decode else self.chunk_tokens)
        budget = self.chunk_tokens - sum(len(row.tokens) for row in local)
        prefill, copies, more = self.prefill.plan(budget, now)
        copies, self.decode.copies = self.decode.copies + copies, []
        rows = local + prefill
        batch = Batch(decode, rows, copies) if decode or rows else None
        return batch, out + more

    def computed(self, batch: Batch, drawn: list[Drawn], now: float) -> list[Instruction]:
        """The engine has run `batch`; `drawn` has one token for each row that asked."""
        out: list[Instruction] = []
        tokens = iter(drawn)
        for row in batch.rows:
            token, logprobs = next(tokens) if row.draw is not None else (None, None)
            role = self.decode if row.attempt in self.decode.sequences else self.prefill
            out += role.computed_row(row, token, logprobs, now)
        return out

    @property
    def idle(self) -> bool:
        return not self.prefill.jobs and not self.decode.sequences

    def validate(self) -> None:
        """Checks every invariant that can be seen from here; O(pages + nodes)."""
        self.cache.validate()
        self.prefill.validate()
        self.decode.validate()
        if self.idle:
            counts = self.cache.counts()
            assert counts.private == counts.in_flight == counts.protected == 0, counts
