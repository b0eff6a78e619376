"""What a worker tells the coordinator of its cache and its speed, as bytes.

Beside the heartbeat, for it comes more often: whenever the cache has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_cluster.cache.events import decode_page_events, encode_page_events
from pd_cluster.coordinator.costs import (
    DecodeMeasured,
    LinkMeasured,
    LowerTier,
    Measured,
    PrefillMeasured,
    TierMeasured,
)
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.errors import WireError
from pd_cluster.types import WorkerId


class _Prefill(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    tokens: int
    attended: float
    seconds: float


class _Decode(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    sequences: int
    kv_tokens: int
    seconds: float


class _Link(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    peer: WorkerId
    tokens: int
    seconds: float


class _Tier(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    tier: LowerTier
    tokens: int
    seconds: float


_Measured = _Prefill | _Decode | _Link | _Tier


class _Telling(msgspec.Struct, frozen=True):
    worker: WorkerId
    first: int
    events: bytes  # `encode_page_events`
    snapshot: bool
    measured: tuple[_Measured, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Telling] = msgspec.msgpack.Decoder(_Telling)


def encode_update(update: KvUpdate, measured: Sequence[Measured] = ()) -> bytes:
    telling = _Telling(
        update.worker,
        update.first,
        encode_page_events(update.events),
        update.snapshot,
        tuple(_pack_measured(each) for each in measured),
    )
    return _encoder.encode(telling)


def decode_update(data: bytes) -> tuple[KvUpdate, list[Measured]]:
    """Raises WireError if `data` is no such message."""
    try:
        telling = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of this version: {error}") from error
    events = tuple(decode_page_events(telling.events))
    update = KvUpdate(telling.worker, telling.first, events, telling.snapshot)
    return update, [_unpack_measured(each) for each in telling.measured]


def _pack_measured(measured: Measured) -> _Measured:
    match measured:
        case PrefillMeasured():
            return _Prefill(measured.tokens, measured.attended, measured.seconds)
        case DecodeMeasured():
            return _Decode(measured.sequences, measured.kv_tokens, measured.seconds)
        case LinkMeasured():
            return _Link(measured.peer, measured.tokens, measured.seconds)
        case TierMeasured():
            return _Tier(measured.tier, measured.tokens, measured.seconds)


def _unpack_measured(measured: _Measured) -> Measured:
    match measured:
        case _Prefill():
            return PrefillMeasured(measured.tokens, measured.attended, measured.seconds)
        case _Decode():
            return DecodeMeasured(measured.sequences, measured.kv_tokens, measured.seconds)
        case _Link():
            return LinkMeasured(measured.peer, measured.tokens, measured.seconds)
        case _Tier():
            return TierMeasured(measured.tier, measured.tokens, measured.seconds)
