"""What one agent tells another about itself, as bytes that the application carries."""

from __future__ import annotations

from typing import Final

import msgspec

from pd_transfer.errors import nixlMismatchError
from pd_transfer.regions import Region

_MAGIC: Final = b"pd_transfer\x00"
VERSION: Final = 2


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of an agent: who it is, how to reach it, what it has registered.

    `connection` belongs to the backend; None in partial metadata that is only about memory.
    `partial` metadata adds to what is known, other metadata takes its place. `generation` is new
    for every agent object, so that a restarted process is never taken for the one before it.
    """

    version: int
    name: str
    generation: bytes
    backend: str
    connection: bytes | None
    regions: list[Region]
    partial: bool = False


def encode(metadata: Metadata) -> bytes:
    return _MAGIC + msgspec.msgpack.encode(metadata)


def decode(data: bytes) -> Metadata:
    """
    Raises:
        nixlMismatchError: not such metadata, or of another version.
    """
    if not data.startswith(_MAGIC):
        raise nixlMismatchError("this is no pd_transfer metadata")
    try:
        metadata = msgspec.msgpack.decode(data[len(_MAGIC) :], type=Metadata)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise nixlMismatchError(f"damaged metadata: {error}") from error
    if metadata.version != VERSION:
        raise nixlMismatchError(f"metadata of version {metadata.version}, expected {VERSION}")
    return metadata
