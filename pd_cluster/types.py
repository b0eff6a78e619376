"""What the processes of a cluster say to each other.

Every message is a frozen struct, sent as bytes (`encode`) and checked when it arrives (`decode`):
a message that does not fit raises WireError and harms nobody. Lengths count tokens unless the name
says pages; times are seconds, always durations, never another process's clock.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from pd_cluster.errors import WireError

IntArray = npt.NDArray[np.int32]
# (address, bytes, device id) of a whole KV memory.
Region = tuple[int, int, int]

Role = Literal["prefill", "decode"]
# How the KV of a prompt comes about: prefill computes and pushes it; prefill first reads what only
# decode holds; decode computes a short tail itself.
Route = Literal["remote", "remote+pull", "local"]
FinishReason = Literal["stop", "length"]
# Who gives up its pages first on a decode worker that has run out of them.
RetractionPolicy = Literal["length", "priority"]
# Who was retracted this often is spared from then on, as long as others can go.
MAX_RETRACTIONS = 3
# How an attempt ended. `refused`, `retracted` and `failed` are tried again by the gateway.
Outcome = Literal["finished", "aborted", "refused", "retracted", "failed"]


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """A worker process: its actor's name and which life of that actor it is."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation}"


class AttemptId(msgspec.Struct, frozen=True, order=True):
    """One try at a request."""

    request: str
    number: int

    def __str__(self) -> str:
        return f"{self.request}#{self.number}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a sequence ends.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing; presence and
    frequency penalties look at the answer, the repetition penalty at the prompt too; `logit_bias`
    is (token, bias) pairs. `max_tokens` and `min_tokens` count the whole answer, over all attempts;
    `seed` is always set (the gateway picks one where the client did not). `logprobs` is how many
    of the likeliest tokens are reported with each token, -1 for no logprobs at all;
    `prompt_logprobs` is the same for the prompt's tokens, which are then all computed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log (base e) of a chosen token's probability, and (id, logprob) of the likeliest."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptScores(msgspec.Struct, frozen=True, kw_only=True):
    """The logprobs of a prompt's tokens, from the second on, each given those before it.

    Little-endian float32 and int32: `logprobs` and `ranks` (1 is the likeliest) have one number a
    token, `top_ids` and `top_logprobs` have `top` a token, the likeliest first.
    """

    top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt came from; the fields sum to the prompt's length (invariant 6)."""

    computed: int = 0
    pulled: int = 0
    disk_hit: int = 0
    host_hit: int = 0
    prefill_hit: int = 0
    decode_hit: int = 0

    @property
    def cached(self) -> int:
        below = self.disk_hit + self.host_hit
        return self.pulled + below + self.prefill_hit + self.decode_hit


# --- gateway → coordinator ------------------------------------------------------------------------


class PlaceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks where an attempt shall run. Asking again for the same attempt gives the same answer."""

    attempt: AttemptId
    gateway: str
    prompt_len: int
    max_tokens: int
    timeout_s: float
    priority: int = 0
    # A further attempt at a request that was placed before: it goes first within its priority.
    resumed: bool = False
    # How often the request was retracted: after a few times it is left alone.
    retractions: int = 0
    # Decode workers that have just refused or lost this request.
    avoid: tuple[WorkerId, ...] = ()
    # `block_hashes` of the prompt, uint64 little-endian: what placement knows of its content.
    blocks: bytes = b""
    # Whose request it is (never a key itself), for fairness and limits; and a hint which requests
    # belong together.
    tenant: str = ""
    routing_key: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    attempt: AttemptId
    prefill: WorkerId
    decode: WorkerId
    route: Route = "remote"
    # Whether decode shall load what its lower tiers hold, rather than have it sent.
    promote: bool = True


class Rejection(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator will not place the attempt; `status` is the HTTP status for the client."""

    attempt: AttemptId
    status: Literal[400, 429, 503, 504]
    reason: str
    message: str
    retry_after_s: float | None = None


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The gateway tells the coordinator that an attempt holds no capacity any more."""

    attempt: AttemptId
    outcome: Outcome


# --- worker → coordinator -------------------------------------------------------------------------


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's heartbeat: what it is, and how loaded. The first one is its registration.

    `signature` is what workers must agree on to exchange pages: names to values, compared key by
    key. `host` is the address that it accepts transfers at. `store` names the store below its host
    tier, which workers that say the same share; "" for none.
    """

    worker: WorkerId
    role: Role
    signature: dict[str, str]
    capacity: int
    available: int
    running: int
    waiting: int
    attempts: tuple[AttemptId, ...] = ()
    routes: tuple[Route, ...] = ("remote",)
    host: str = ""
    store: str = ""


class ReportReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`error` says why a worker may not take part (it differs from the others), else None."""

    error: str | None = None
    retraction_policy: RetractionPolicy = "length"


class CacheNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What has changed in a worker's cache: `coordinator.wire.encode_update`. `number` counts."""

    worker: WorkerId
    number: int
    update: bytes


class CacheNewsTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers CacheNews. Where it does not follow what is known, all of the cache is asked for."""

    number: int
    follows: bool


# --- coordinator → decode worker ------------------------------------------------------------------


class MakeRoom(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Retract as many of `candidates` as it takes to have `tokens` available; none if all of them
    are not enough.

    With each goes what was set aside for its growth, in tokens: that much less is needed then.
    """

    tokens: int
    candidates: tuple[tuple[AttemptId, int], ...]


# --- gateway → decode worker ----------------------------------------------------------------------


class StartAttempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Starts an attempt on a decode worker.

    `tokens` is int32 little-endian: the prompt (`prompt_len` tokens) and what earlier attempts
    have already given to the client. `timeout_s` is what is left of the request's time.
    """

    attempt: AttemptId
    gateway: str
    prefill: WorkerId
    tokens: bytes
    prompt_len: int
    params: SamplingParams
    timeout_s: float
    route: Route = "remote"
    promote: bool = True
    sequence: int = 0
    namespace: str | None = None
    priority: int = 0
    retractions: int = 0


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    attempt: AttemptId


# --- decode worker → prefill worker ---------------------------------------------------------------


# Of a page, where transfers are verified.
CHECKSUM_BYTES = 4


class StartPrefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A reservation, handed to the prefill worker.

    `agent` and `region` are decode's transfer metadata and its KV memory; `pages` (int32
    little-endian) are its pages for the tokens from `resident` on, in order; `resident` is a
    multiple of the page size. `held` are decode's pages for the tokens before that, to be read from
    where prefill lacks them; empty where nothing is to be read. `held_checksums` are of those,
    4 bytes each, where reads are to be verified.
    """

    attempt: AttemptId
    decode: WorkerId
    agent: bytes
    region: Region
    tokens: bytes
    params: SamplingParams
    resident: int
    pages: bytes
    prompt_len: int
    timeout_s: float
    held: bytes = b""
    sequence: int = 0
    namespace: str | None = None
    priority: int = 0
    held_checksums: bytes = b""


class AbortPrefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop working for an attempt, and answer PrefillAborted when nothing of it can land any
    more.
    """

    attempt: AttemptId
    decode: WorkerId


# --- prefill worker → decode worker (transfer notifications) --------------------------------------


class PagesWritten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`count` of the reservation's pages, from its page `first` on, are in decode's memory.

    With `checksums`, 4 bytes a page, only if decode finds there what these are of.
    """

    attempt: AttemptId
    first: int
    count: int
    checksums: bytes = b""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first token, sent as soon as it is known; pages may still be on their way."""

    attempt: AttemptId
    token: int
    sources: Sources
    queue_s: float
    prefill_s: float
    logprobs: TokenLogprobs | None = None
    prompt_scores: PromptScores | None = None


class PrefillFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prefill ended without a first token, and nothing of it can land any more."""

    attempt: AttemptId
    reason: str


class PrefillAborted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to AbortPrefill: nothing of the attempt can land any more."""

    attempt: AttemptId


# --- decode worker → gateway ----------------------------------------------------------------------


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one attempt.

    `number` counts the attempt's outputs from 0: messages may overtake each other on their way.
    `finish_reason` is set with `outcome` "finished"; `message` explains every other outcome.
    `resident` is the part of the prompt that decode held when it reserved. `sources` come with the
    first token, and so do `prompt_scores` where they were asked for.
    """

    attempt: AttemptId
    number: int = 0
    tokens: tuple[int, ...] = ()
    outcome: Outcome | None = None
    finish_reason: FinishReason | None = None
    message: str = ""
    resident: int = 0
    sources: Sources | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_scores: PromptScores | None = None


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What has come of a step, or of some events, for one gateway."""

    worker: WorkerId
    outputs: tuple[Output, ...]


Message = (
    PlaceRequest
    | Placement
    | Rejection
    | AttemptEnded
    | WorkerReport
    | ReportReply
    | CacheNews
    | CacheNewsTaken
    | MakeRoom
    | StartAttempt
    | CancelAttempt
    | StartPrefill
    | AbortPrefill
    | PagesWritten
    | FirstToken
    | PrefillFailed
    | PrefillAborted
    | OutputBatch
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


@overload
def decode(data: bytes, expected: type[T]) -> T: ...


@overload
def decode(data: bytes, expected: tuple[type[Any], ...]) -> Any: ...


def decode(data: bytes, expected: type[Any] | tuple[type[Any], ...]) -> Any:
    """The message in `data`; WireError if it is none, or none of the `expected` types."""
    try:
        message: Any = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of this version: {error}") from error
    if not isinstance(message, expected):
        types = expected if isinstance(expected, tuple) else (expected,)
        names = ", ".join(each.__name__ for each in types)
        raise WireError(f"unexpected {type(message).__name__}; expected {names}")
    return message


def pack_ints(values: npt.ArrayLike) -> bytes:
    """int32 little-endian bytes of a list or array of token or page ids."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes) -> IntArray:
    if len(data) % 4:
        raise WireError(f"an int32 array of {len(data)} bytes")
    return np.frombuffer(data, dtype="<i4").astype(np.int32)
