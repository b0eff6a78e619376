"""What a prefix cache tells others of what it holds.

Within a worker, events name pages of a tier: while a page is stored it stands for one prefix,
whatever splits happen (`PagesStored`, `PagesRemoved`, `PagesCleared`, `StorageHolds`). To others,
events name blocks of tokens by chained hashes (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`):
names, fields and msgpack encoding are those of vLLM and SGLang, so that what indexes them can index
us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import Pages
from pd_cluster.errors import WireError
from pd_cluster.types import pack_ints, unpack_ints

# Where a block lies, as vLLM and those who index it say it; GPU is the worker's KV memory, also
# where that is a CPU's.
MEDIUM_DEVICE = "GPU"
MEDIUM_HOST = "CPU"

# Whose pages an event names: each tier has a pool of its own.
Tier: TypeAlias = Literal["device", "host"]


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """A run of tokens was cached after the prefix that ends with page `parent` (None: at the top).

    `tokens` fill `pages` exactly.
    """

    namespace: str | None
    parent: int | None
    tokens: Tokens
    pages: Pages
    tier: Tier = "device"


@dataclass(frozen=True, slots=True, eq=False)
class PagesRemoved:
    """These pages no longer stand for a prefix."""

    pages: Pages
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """Nothing is cached any more on that tier."""

    tier: Tier = "device"


@dataclass(frozen=True, slots=True, eq=False)
class StorageHolds:
    """The blocks that end with these host pages were just written to storage, or read from it.

    Storage forgets without a word: what it once held may be gone.
    """

    pages: Pages


CacheEvent: TypeAlias = PagesStored | PagesRemoved | PagesCleared | StorageHolds


class _Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    namespace: str | None
    parent: int | None
    tokens: bytes
    pages: bytes
    tier: Tier


class _Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    pages: bytes
    tier: Tier


class _Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    tier: Tier


class _StorageHolds(msgspec.Struct, frozen=True, array_like=True, tag="storage"):
    pages: bytes


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of `block_size` tokens were cached after the block `parent_block_hash`.

    `extra_keys` names the namespace of each block, or is None where there is none. The fields after
    it are others' for models that we do not serve.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing is cached any more, on any medium."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What is published over ZMQ. `ts` is seconds since the epoch."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_PageEvent = _Stored | _Removed | _Cleared | _StorageHolds
_page_decoder = msgspec.msgpack.Decoder(list[_PageEvent])
_batch_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_decoder = msgspec.msgpack.Decoder(list[KvEvent])


def encode_page_events(events: Sequence[CacheEvent]) -> bytes:
    """msgpack, arrays as int32 little-endian: for messages between our own processes."""
    wire: list[_PageEvent] = []
    for event in events:
        match event:
            case PagesStored():
                tokens, pages = pack_ints(event.tokens), pack_ints(event.pages)
                wire.append(_Stored(event.namespace, event.parent, tokens, pages, event.tier))
            case PagesRemoved():
                wire.append(_Removed(pack_ints(event.pages), event.tier))
            case PagesCleared():
                wire.append(_Cleared(event.tier))
            case StorageHolds():
                wire.append(_StorageHolds(pack_ints(event.pages)))
    return _encoder.encode(wire)


def decode_page_events(data: bytes) -> list[CacheEvent]:
    """Raises WireError where `data` is not a list of page events."""
    try:
        wire = _page_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not page events of this version: {error}") from error
    events: list[CacheEvent] = []
    for event in wire:
        match event:
            case _Stored():
                tokens, pages = unpack_ints(event.tokens), unpack_ints(event.pages)
                if not len(pages) or len(tokens) % len(pages) or (pages < 0).any():
                    raise WireError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
                stored = PagesStored(event.namespace, event.parent, tokens, pages, event.tier)
                events.append(stored)
            case _Removed():
                events.append(PagesRemoved(unpack_ints(event.pages), event.tier))
            case _Cleared():
                events.append(PagesCleared(event.tier))
            case _StorageHolds():
                events.append(StorageHolds(unpack_ints(event.pages)))
    return events


def encode_events(events: Sequence[KvEvent]) -> bytes:
    """msgpack, for messages between our own processes."""
    return _encoder.encode(list(events))


def decode_events(data: bytes) -> list[KvEvent]:
    """Raises WireError where `data` is not a list of events."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not KV events of this version: {error}") from error


def encode_batch(batch: KvEventBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> KvEventBatch:
    """Raises WireError where `data` is not a batch of events."""
    try:
        return _batch_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a batch of KV events of this version: {error}") from error
