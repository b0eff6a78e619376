"""What a request's state is told, and what it orders (request.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    FinishReason,
    Output,
    Placement,
    PlaceRequest,
    PromptScores,
    Rejection,
    Sources,
    StartAttempt,
    TokenLogprobs,
    WorkerId,
)

End = Literal["finished", "aborted", "failed"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has used, in tokens. `sources` is None until the first token is there."""

    prompt_tokens: int
    completion_tokens: int
    sources: Sources | None = None

    @property
    def cached_tokens(self) -> int:
        return self.sources.cached if self.sources else 0


# --- events --------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """The request was accepted."""


class Placed(msgspec.Struct, frozen=True):
    placement: Placement


class Rejected(msgspec.Struct, frozen=True):
    rejection: Rejection


class Delivered(msgspec.Struct, frozen=True):
    worker: WorkerId
    output: Output


class WorkerLost(msgspec.Struct, frozen=True):
    """A decode worker died."""

    worker: WorkerId


class SubmitFailed(msgspec.Struct, frozen=True):
    """StartAttempt did not reach its worker."""

    attempt: AttemptId
    reason: str


class StopStringFound(msgspec.Struct, frozen=True):
    """The text of the tokens so far holds one of the request's stop strings."""


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any more."""


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The request's time is over."""


class DrainExpired(msgspec.Struct, frozen=True):
    """A cancelled attempt was not confirmed in time.

    The worker's reports will tell the coordinator what it still holds.
    """


Event = (
    Started
    | Placed
    | Rejected
    | Delivered
    | WorkerLost
    | SubmitFailed
    | StopStringFound
    | ClientGone
    | DeadlinePassed
    | DrainExpired
)

# --- instructions --------------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True):
    """Ask the coordinator, after `delay_s`. Replaces a question that is still open."""

    request: PlaceRequest
    delay_s: float = 0.0


class Submit(msgspec.Struct, frozen=True):
    worker: WorkerId
    message: StartAttempt


class Cancel(msgspec.Struct, frozen=True):
    worker: WorkerId
    message: CancelAttempt


class EndAttempt(msgspec.Struct, frozen=True):
    message: AttemptEnded


class Emit(msgspec.Struct, frozen=True):
    """Tokens for the client, with their logprobs where the request asked for them; with the first
    ones come those of the prompt.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_scores: PromptScores | None = None


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end, for the client: `reason` with "finished", `error` with "failed".

    `recovered` names what the request has survived: "retracted", "failed", "worker_lost".
    """

    end: End
    usage: Usage
    reason: FinishReason | None = None
    error: RequestError | None = None
    recovered: tuple[str, ...] = ()


Instruction = Place | Submit | Cancel | EndAttempt | Emit | Finish
