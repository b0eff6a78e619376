"""The state of one request: its attempts, and what the client has already got.

Pure: events go in, instructions come out, time is an argument (seconds of one monotonic clock).

    new ──► placing ⇄ running ──► finished | failed
               │         │
               │         └──► draining ──► finished | aborted | failed
               └──► finished | aborted | failed

`draining`: the client has its answer, but a worker may still hold memory for the cancelled
attempt; the coordinator hears of the end when the worker has confirmed it. Every request gives
exactly one Finish, and every attempt that was asked for and not rejected is ended at the
coordinator exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, assert_never

from pd_cluster.errors import (
    AttemptsExhausted,
    BadRequest,
    DeadlineExceeded,
    InvalidTransition,
    Overloaded,
    RequestError,
    Unavailable,
)
from pd_cluster.gateway.instructions import (
    Cancel,
    ClientGone,
    DeadlinePassed,
    Delivered,
    DrainExpired,
    Emit,
    End,
    EndAttempt,
    Event,
    Finish,
    Instruction,
    Place,
    Placed,
    Rejected,
    Started,
    StopStringFound,
    Submit,
    SubmitFailed,
    Usage,
    WorkerLost,
)
from pd_cluster.states import Tracked, Transitions
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    FinishReason,
    Outcome,
    Output,
    Placement,
    PlaceRequest,
    Rejection,
    SamplingParams,
    Sources,
    StartAttempt,
    WorkerId,
    pack_ints,
)

State = Literal["new", "placing", "running", "draining", "finished", "aborted", "failed"]

TRANSITIONS: Transitions[State] = {
    ("new", "placing"): "asks for a first placement",
    ("placing", "placing"): "asks again, the client has part of the answer",
    ("placing", "running"): "placed, and handed to its decode worker",
    ("placing", "finished"): "a stop string was in the text of an earlier attempt",
    ("placing", "aborted"): "nobody waits any more",
    ("placing", "failed"): "rejected, or out of time",
    ("running", "placing"): "the attempt was refused, retracted or lost",
    ("running", "draining"): "cancelled, the worker has not confirmed it",
    ("running", "finished"): "all tokens are there",
    ("running", "failed"): "too many attempts failed",
    ("draining", "finished"): "the worker has confirmed, or is dead",
    ("draining", "aborted"): "the worker has confirmed, or is dead",
    ("draining", "failed"): "the worker has confirmed, or is dead",
}

# The wait before trying again doubles from the first to the second, in seconds: without it, a dead
# peer that the coordinator has not noticed yet would use up every attempt within milliseconds.
BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 2.0

_REJECTIONS: dict[int, type[RequestError]] = {
    400: BadRequest,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class RequestState(Tracked[State]):
    """Decides what happens next with one request.

    `end_token_ids` end a sequence (end-of-sequence ids unless ignored, and the request's own): a
    request that lost its worker after such a token needs no further attempt. `max_attempts` bounds
    the failed attempts; refused and retracted ones are bounded by `deadline` (seconds, same clock
    as `now`) alone. `time_limit` names what set the deadline, for the error that tells of it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        gateway: str,
        now: float,
        deadline: float,
        max_attempts: int,
        end_token_ids: Collection[int] = (),
        namespace: str | None = None,
        sequence: int = 0,
        priority: int = 0,
        tenant: str = "",
        routing_key: str = "",
        time_limit: str = "timeouts.request_s",
    ) -> None:
        assert prompt, "a request without a prompt"
        super().__init__(f"request {request_id}", "new", TRANSITIONS, now)
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.tokens: list[int] = []
        self.sources: Sources | None = None
        self.failures = 0
        self._gateway = gateway
        self._deadline = deadline
        self._max_attempts = max_attempts
        self._end_token_ids = frozenset(end_token_ids)
        self._namespace = namespace
        self._sequence = sequence
        self._priority = priority
        self._tenant = tenant
        self._routing_key = routing_key
        self._retractions = 0
        self.retracted = False  # that is how the last attempt ended
        self._time_limit = time_limit
        self._number = 0
        self._placement: Placement | None = None
        self._finish: Finish | None = None
        # Outputs of the attempt that were taken, and those that came before an earlier one.
        self.outputs_taken = 0
        self._early: dict[int, Output] = {}
        # Tries since the last token, and the workers that these tries were lost on.
        self._fruitless = 0
        self._avoid: dict[WorkerId, None] = {}
        self._recovered: dict[str, None] = {}

    @property
    def attempt(self) -> AttemptId:
        return AttemptId(self.request_id, self._number)

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "aborted", "failed")

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            sources=self.sources,
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The only mutator. What comes too late or is of another attempt gives no instruction."""
        match event:
            case Started():
                if self.state != "new":
                    raise self._illegal("placing")
                return self._place(now)
            case Placed(placement):
                return self._placed(placement, now)
            case Rejected(rejection):
                return self._rejected(rejection, now)
            case Delivered(worker, output):
                return self._delivered(worker, output, now)
            case WorkerLost(worker):
                if self._placement is None or self._placement.decode != worker:
                    return []
                return self._lost(f"decode worker {worker} died", now)
            case SubmitFailed(attempt, reason):
                if self._placement is None or attempt != self.attempt:
                    return []
                return self._lost(f"decode worker {self._placement.decode}: {reason}", now)
            case StopStringFound():
                return self._cancel("finished", now, "stop string", reason="stop")
            case ClientGone():
                return self._cancel("aborted", now, "client gone")
            case DeadlinePassed():
                return self._cancel("failed", now, "deadline", error=self._deadline_error())
            case DrainExpired():
                return self._drained("aborted", now) if self.state == "draining" else []
            case _:
                assert_never(event)

    def validate(self) -> None:
        """Checks what always holds; our bug where it does not."""
        assert (self._placement is not None) == (self.state in ("running", "draining"))
        assert (self._finish is not None) == (self.state == "draining" or self.ended)
        assert len(self.tokens) <= self.params.max_tokens
        assert self.failures <= self._max_attempts
        assert self.sources is not None or not self.tokens

    # --- events ----------------------------------------------------------------------------------

    def _placed(self, placement: Placement, now: float) -> list[Instruction]:
        if self.ended or placement.attempt != self.attempt:
            return []
        self.move("running", now, f"attempt {self._number} on {placement.decode}")
        self._placement = placement
        message = StartAttempt(
            attempt=self.attempt,
            gateway=self._gateway,
            prefill=placement.prefill,
            tokens=pack_ints(self.prompt + tuple(self.tokens)),
            prompt_len=len(self.prompt),
            params=self.params,
            timeout_s=max(0.0, self._deadline - now),
            route=placement.route,
            promote=placement.promote,
            sequence=self._sequence,
            namespace=self._namespace,
            priority=self._priority,
            retractions=self._retractions,
        )
        return [Submit(placement.decode, message)]

    def _rejected(self, rejection: Rejection, now: float) -> list[Instruction]:
        if self.ended or rejection.attempt != self.attempt:
            return []
        if self.state != "placing":
            raise self._illegal("failed")
        if self._number > 1 and rejection.status in (429, 503):
            # It was admitted once: only its deadline ends the wait for another place.
            self._fruitless += 1
            return self._place(now, rejection.message, delay_s=rejection.retry_after_s)
        error = _REJECTIONS[rejection.status](
            rejection.message, code=rejection.reason, retry_after=rejection.retry_after_s
        )
        return self._end("failed", now, rejection.message, error=error)

    def _delivered(self, worker: WorkerId, output: Output, now: float) -> list[Instruction]:
        placement = self._placement
        if placement is None or placement.decode != worker or output.attempt != self.attempt:
            return []
        if self.state == "draining":
            early = (each.outcome for each in self._early.values() if each.outcome)
            outcome = output.outcome or next(early, None)
            return self._drained(outcome, now) if outcome else []
        if output.number < self.outputs_taken:
            return []
        self._early[output.number] = output
        instructions: list[Instruction] = []
        while self._placement is placement and self.outputs_taken in self._early:
            following = self._early.pop(self.outputs_taken)
            self.outputs_taken += 1
            instructions += self._output(following, now)
        return instructions

    def _output(self, output: Output, now: float) -> list[Instruction]:
        """The next of the attempt's outputs."""
        instructions: list[Instruction] = []
        if self.sources is None:
            self.sources = output.sources
        if output.tokens:
            self.tokens.extend(output.tokens)
            self._fruitless = 0
            self._avoid.clear()
            instructions.append(Emit(output.tokens, output.logprobs, output.prompt_scores))
        match output.outcome:
            case None:
                return instructions
            case "finished":
                instructions.append(self._end_attempt("finished"))
                return instructions + self._end("finished", now, reason=output.finish_reason)
            case "refused":
                return instructions + self._again("refused", output.message, now)
            case "retracted":
                return instructions + self._again("retracted", output.message, now)
            case "failed" | "aborted":
                # We have not asked for an abort: it is the worker's failure.
                return instructions + self._again("failed", output.message, now)

    def _lost(self, message: str, now: float) -> list[Instruction]:
        if self.state == "draining":
            return self._drained("aborted", now)
        return self._again("failed", message, now, cause="worker_lost")

    def _cancel(
        self,
        end: End,
        now: float,
        why: str,
        *,
        reason: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> list[Instruction]:
        """Ends the request for the client, whatever it is doing."""
        if self.state == "draining" or self.ended:
            return []
        if self.state == "placing":
            ended = self._end_attempt("aborted")
            return [ended, *self._end(end, now, why, reason=reason, error=error)]
        self.move("draining", now, why)
        assert self._placement is not None
        self._finish = self._make_finish(end, reason=reason, error=error)
        return [Cancel(self._placement.decode, CancelAttempt(attempt=self.attempt)), self._finish]

    # --- steps -----------------------------------------------------------------------------------

    def _again(
        self,
        outcome: Literal["refused", "retracted", "failed"],
        message: str,
        now: float,
        cause: str | None = None,
    ) -> list[Instruction]:
        """The attempt ended without ending the request: tries once more, or gives up."""
        assert self._placement is not None
        decode = self._placement.decode
        ended = self._end_attempt(outcome)
        if len(self.tokens) >= self.params.max_tokens:
            return [ended, *self._end("finished", now, message, reason="length")]
        if self.tokens and self.tokens[-1] in self._end_token_ids:
            return [ended, *self._end("finished", now, message, reason="stop")]
        if outcome == "failed":
            self.failures += 1
            if self.failures >= self._max_attempts:
                error = AttemptsExhausted(
                    f"{self.failures} attempts failed, the last one: {message}",
                    code="attempts_exhausted",
                )
                return [ended, *self._end("failed", now, message, error=error)]
        self.retracted = outcome == "retracted"
        self._retractions += self.retracted
        if outcome != "refused":
            self._recovered[cause or outcome] = None
        if outcome == "refused" or cause == "worker_lost":
            self._avoid[decode] = None
        self._fruitless += 1
        return [ended, *self._place(now, f"{outcome}: {message}")]

    def _place(self, now: float, why: str = "", delay_s: float | None = None) -> list[Instruction]:
        self.move("placing", now, why)
        self._number += 1
        self.outputs_taken = 0
        self._early.clear()
        if delay_s is None:
            # The second try follows at once: most reasons for one concern a single worker.
            doublings = self._fruitless - 2
            delay_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2**doublings) if doublings >= 0 else 0.0
        request = PlaceRequest(
            attempt=self.attempt,
            gateway=self._gateway,
            prompt_len=len(self.prompt) + len(self.tokens),
            max_tokens=self.params.max_tokens - len(self.tokens),
            timeout_s=max(0.0, self._deadline - now - delay_s),
            resumed=self._number > 1,
            retractions=self._retractions,
            avoid=tuple(self._avoid),
            priority=self._priority,
            tenant=self._tenant,
            routing_key=self._routing_key,
        )
        return [Place(request, delay_s)]

    def _end_attempt(self, outcome: Outcome) -> EndAttempt:
        self._placement = None
        return EndAttempt(AttemptEnded(attempt=self.attempt, outcome=outcome))

    def _drained(self, outcome: Outcome, now: float) -> list[Instruction]:
        assert self._finish is not None
        self.move(self._finish.end, now)
        return [self._end_attempt(outcome)]

    def _end(
        self,
        end: End,
        now: float,
        why: str = "",
        *,
        reason: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> list[Instruction]:
        self.move(end, now, why)
        self._finish = self._make_finish(end, reason=reason, error=error)
        return [self._finish]

    def _make_finish(
        self, end: End, *, reason: FinishReason | None, error: RequestError | None
    ) -> Finish:
        return Finish(
            end=end,
            usage=self.usage,
            reason=reason,
            error=error,
            recovered=tuple(self._recovered),
        )

    def _illegal(self, finish: State) -> InvalidTransition:
        return InvalidTransition(self.who, self.state, finish, self.story)

    def _deadline_error(self) -> DeadlineExceeded:
        where = f"while {self.state}, attempt {self._number}, {len(self.tokens)} tokens generated"
        _, _, why = self.story[-1]
        return DeadlineExceeded(
            f"the request's time, {self._time_limit}, was over ({where}; last: {why})",
            code="deadline_exceeded",
        )
