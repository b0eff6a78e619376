"""What a cache with tiers remembers of a request, and of each copy that is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import Pages
from pd_cluster.cache.prefix_cache import PrefixCache, Published


class Segment(NamedTuple):
    """What a node on a path knows of its use: it reaches to `end` tokens from the start."""

    end: int
    hits: int
    priority: int


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Totals since the start, in tokens."""

    host_loaded: int
    storage_loaded: int
    backed_up: int
    stored: int
    backups_skipped: int
    errors: int


class TierRead(NamedTuple):
    """So many tokens were read from a tier in so many seconds, waiting left out."""

    tier: Literal["host", "storage"]
    tokens: int
    seconds: float


@dataclass(slots=True, eq=False)
class Promotion:
    """What one request has coming up from the tiers."""

    tokens: Tokens
    namespace: str | None
    deadline: float
    state: Literal["searching", "loading", "ready"] = "searching"
    op: int | None = None
    node: Node | None = None  # holds a lock on the device, once loading
    fetched_from: int | None = None  # tokens from here on came from storage
    host_tokens: int = 0
    storage_tokens: int = 0
    settled: bool = False


@dataclass(slots=True, eq=False)
class Backup:
    """Device pages on their way to the host."""

    tokens: Tokens
    namespace: str | None
    first: int  # pages that the host has already
    device: Pages
    host: Pages
    host_node: Node
    segments: list[Segment] | None  # None: as the device's tree says at the end


@dataclass(slots=True, eq=False)
class Load:
    """Host pages on their way to the device."""

    promotion: Promotion
    tokens: Tokens
    above: Pages
    device: Pages
    device_node: Node
    host_node: Node
    segments: list[Segment]


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of storage on their way to the host."""

    promotion: Promotion
    tokens: Tokens
    namespace: str | None
    start: int
    above: Pages
    host: Pages
    host_node: Node
    taken: int = 0  # pages of `host` that the tree has


def segments_of(path: list[Node]) -> list[Segment]:
    """Of the nodes of a path from the top."""
    segments, end = [], 0
    for node in path:
        end += node.tokens.size
        segments.append(Segment(end, node.hit_count, node.priority))
    return segments


def publish_segments(
    cache: PrefixCache,
    tokens: Tokens,
    table: Pages,
    namespace: str | None,
    segments: list[Segment],
    now: float,
) -> Published:
    """Publishes all of `tokens`, with the hits and priority that each part had elsewhere."""
    for end, hits, priority in segments:
        if end >= tokens.size:
            break
        kept = cache.publish(tokens[:end], table, namespace, now=now, priority=priority, hits=hits)
        table = kept.pages
    last = next((each for each in segments if each.end >= tokens.size), Segment(0, 0, 0))
    return cache.publish(tokens, table, namespace, now=now, priority=last.priority, hits=last.hits)
