"""What the worker's pure schedulers are told, and what they ask of the shell around them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster.cache.tier_ops import TierEvent
from pd_cluster.draw import Draw, Known
from pd_cluster.types import (
    AbortPrefill,
    AttemptId,
    CancelAttempt,
    FirstToken,
    IntArray,
    MakeRoom,
    Message,
    Output,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    Region,
    StartAttempt,
    StartPrefill,
    WorkerId,
)

# --- events (besides the messages of other processes) ---


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A WritePages is over: nothing of it reads or writes memory any more. `error` is "" if
    done.
    """

    transfer: int
    error: str = ""


# Why a transfer failed whose pages are not what was sent.
CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class PagesCorrupt:
    """Pages of a reservation hold something else than what was sent."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A worker process is dead, and nothing that it sent can land any more."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway: str


Event = (
    StartAttempt
    | CancelAttempt
    | MakeRoom
    | StartPrefill
    | AbortPrefill
    | PagesWritten
    | FirstToken
    | PrefillFailed
    | PrefillAborted
    | TransferEnded
    | PagesCorrupt
    | TierEvent
    | PeerLost
    | GatewayLost
)

# --- instructions ---


@dataclass(frozen=True, slots=True)
class WritePages:
    """Write `source` pages of this pool into `target` pages of the peer's, then notify `done`
    there.

    The shell answers with TransferEnded(transfer).
    """

    transfer: int
    peer: WorkerId
    source: IntArray = field(compare=False)
    target: IntArray = field(compare=False)
    done: PagesWritten

    @property
    def attempt(self) -> AttemptId:
        return self.done.attempt


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Read `source` pages of the peer's pool into `target` pages of this one.

    The shell answers with TransferEnded(transfer).
    """

    transfer: int
    peer: WorkerId
    source: IntArray = field(compare=False)
    target: IntArray = field(compare=False)
    attempt: AttemptId
    checksums: bytes = b""
    """Of `source`, 4 bytes a page, where the peer gave them."""


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Stop a WritePages or ReadPages as soon as may be; TransferEnded still comes."""

    transfer: int


@dataclass(frozen=True, slots=True)
class VerifyPages:
    """See whether these pages hold what `message.checksums` are of.

    The shell answers with the message without them, or PagesCorrupt.
    """

    message: PagesWritten
    pages: IntArray = field(compare=False)


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the peer known to the transport: its metadata, and where its KV memory lies."""

    peer: WorkerId
    agent: bytes
    region: Region


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a decode worker something, beside its pages."""

    peer: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Call another worker."""

    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give a gateway what an attempt produced; the shell sends one message per step and gateway."""

    gateway: str
    output: Output


Instruction = (
    WritePages | ReadPages | AbortTransfer | VerifyPages | Connect | Notify | Send | Deliver
)

# --- a step of the engine ---


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step.

    `tokens` are computed at positions `start`..; `pages` is the page table for all tokens up to
    there, the new ones included. `draw` is None where no token is wanted, `known` where no known
    ones are to be scored: else they are those after each of `tokens`, as far as they are known.
    """

    attempt: AttemptId
    tokens: IntArray
    start: int
    pages: IntArray
    draw: Draw | None
    known: Known | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is wanted of its logits."""
        return self.draw is not None or self.known is not None

    @property
    def num_logits(self) -> int:
        """After how many of the tokens, the last ones, logits are wanted."""
        drawn = 1 if self.draw is not None else 0
        return drawn if self.known is None else drawn + len(self.known.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decode rows (one token each) and prefill rows (a chunk of a prompt each).

    `copies` are (source page, target page) pairs to be copied before the step.
    """

    decode: list[Row]
    prefill: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return self.decode + self.prefill
