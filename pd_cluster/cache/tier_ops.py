"""What a cache with tiers asks to have copied, and what it is told of it.

The cache only keeps the books: whoever owns the memories carries the operations out, in threads of
its own, and reports each one's end with a `TierEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import Pages

WritePolicy = Literal["write_through", "write_back", "write_through_selective"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copy device pages to host pages.

    With `now` before anything else is done: the device pages are about to be written by others.
    """

    op: int
    device: Pages
    host: Pages
    now: bool


@dataclass(frozen=True, slots=True, eq=False)
class CopyIn:
    """Copy host pages to device pages."""

    op: int
    host: Pages
    device: Pages


@dataclass(frozen=True, slots=True, eq=False)
class ProbeBlocks:
    """Find out how many tokens from `start` on are in storage, in whole blocks without a gap."""

    op: int
    tokens: Tokens
    namespace: str | None
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchBlocks:
    """Read blocks from storage into `host` pages, for the tokens from `start` on, in order.

    May be reported in parts; ends with the first block that is missing.
    """

    op: int
    tokens: Tokens
    namespace: str | None
    start: int
    host: Pages


@dataclass(frozen=True, slots=True, eq=False)
class StopFetch:
    """End a FetchBlocks as soon as may be; its last TierEvent still comes."""

    op: int


@dataclass(frozen=True, slots=True, eq=False)
class StoreBlocks:
    """Write `host` pages to storage: the blocks of the tokens from `start` to the end."""

    op: int
    tokens: Tokens
    namespace: str | None
    start: int
    host: Pages


TierOp: TypeAlias = CopyOut | CopyIn | ProbeBlocks | FetchBlocks | StopFetch | StoreBlocks


@dataclass(frozen=True, slots=True)
class TierEvent:
    """An operation has come to `tokens` tokens (probed or fetched; else all or none).

    With `done` it is over: nothing of it touches memory any more. `seconds` is what the copying or
    reading took, waiting for its turn left out. With an `error` all that was not reported is lost.
    """

    op: int
    tokens: int = 0
    done: bool = True
    seconds: float = 0.0
    error: str = ""
