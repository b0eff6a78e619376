"""What travels on a control connection: typed msgpack in length-prefixed frames.

dialer                                acceptor
Hello            ->
                 <-                   Challenge | Refused
Sealed(Identity) ->                             handshake.py
                 <-                   Sealed(Identity) | Refused
Sealed(Ready)    ->
                 <-                   Sealed(Ready)
Attach           ->                   TCP: on a second connection, which then carries data alone
                 <-                   a proof in return, DATA_PROOF bytes
Post, Notify     ->                   then at any time
                 <-                   Done | Failed | Granted (READ, CROSS_MEMORY)
Open             ->                   before the first transfer with a GPU's memory at either end
                 <-                   Opened | Refused
Stopped (WRITE)  ->                   the dialer sends no further message of this transfer
                 <-                   Drained: all that was sent has been taken or thrown away
Stop (READ)      ->
                 <-                   Stopped
ReadEnded        ->
Bye              ->                   the dialer closes on purpose
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
import numpy as np

from pd_transfer.errors import (
    nixlBackendError,
    nixlNotAllowedError,
    nixlNotFoundError,
)
from pd_transfer.regions import Vector

VERSION: Final = 4
_LITTLE: Final = np.dtype("<u8")
HEADER: Final = struct.Struct("<I")
# Before its peer has proved itself, a connection cannot make us hold more than this.
STRANGER_FRAME: Final = 16 * 1024
PEER_FRAME: Final = 256 * 1024 * 1024
MAX_TRANSFER_BYTES: Final = 1 << 42
# A wire names its messages by 64 bits, of which the place in the plan takes 24.
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class ProtocolError(Exception):
    """The other side sent what no agent of this version sends. Its connection is closed."""


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    version: int
    name: str
    generation: bytes
    wanted_generation: bytes
    nonce: bytes


class Challenge(msgspec.Struct, tag=2, array_like=True, frozen=True):
    version: int
    nonce: bytes


class Refused(msgspec.Struct, tag=3, array_like=True, frozen=True):
    code: int
    text: str


class Sealed(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """An encoded message and the proof that its sender knows the secret and this handshake."""

    mac: bytes
    body: bytes


class Identity(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Where a process runs, and the best transports that it can use: with a peer on the same host
    and with one elsewhere."""

    host: str
    pid: int
    probe_address: int
    probe: bytes
    transport: int
    fabric: int


class Ready(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The chosen transport, the dialer's word being final, and where data goes.

    `address` is the UCX worker's; for TCP the acceptor's ticket for the data connection.
    """

    transport: int
    address: bytes


class Post(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """A transfer begins. `addresses` is (R,) uint64 little-endian, in the acceptor's memory.

    `lengths` likewise, or empty where all runs have `uniform` bytes. `sources` is where the
    acceptor finds the bytes of a WRITE in the dialer's memory, empty where it cannot read that.
    `on_device`: the bytes take the way that `Open` has opened.
    """

    id: _Id
    operation: int
    regions: list[int]
    addresses: bytes
    lengths: bytes
    uniform: int
    descriptors: _Count
    notification: bytes | None
    sources: bytes = b""
    on_device: bool = False


class Done(msgspec.Struct, tag=9, array_like=True, frozen=True):
    id: _Id


class Failed(msgspec.Struct, tag=10, array_like=True, frozen=True):
    id: _Id
    code: int
    text: str


class Stop(msgspec.Struct, tag=11, array_like=True, frozen=True):
    id: _Id


class Stopped(msgspec.Struct, tag=12, array_like=True, frozen=True):
    id: _Id
    sent: _Count


class Drained(msgspec.Struct, tag=13, array_like=True, frozen=True):
    id: _Id


class ReadEnded(msgspec.Struct, tag=14, array_like=True, frozen=True):
    id: _Id
    completed: bool
    notification: bytes | None


class Notify(msgspec.Struct, tag=15, array_like=True, frozen=True):
    message: bytes


class Granted(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """The dialer may read now, until it sends `ReadEnded`."""

    id: _Id


class Bye(msgspec.Struct, tag=16, array_like=True, frozen=True):
    pass


class Attach(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """The first and only message of a data connection: the link's ticket, and the secret's proof.

    A ticket is good for one connection.
    """

    ticket: bytes
    proof: bytes


class Open(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """The address of the dialer's UCX worker for a GPU's memory, and the secret's proof of it: UCX
    trusts what is in an address."""

    address: bytes
    proof: bytes


class Opened(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """As `Open`, of the acceptor."""

    address: bytes
    proof: bytes


Message = (
    Hello
    | Attach
    | Open
    | Opened
    | Challenge
    | Refused
    | Sealed
    | Identity
    | Ready
    | Post
    | Done
    | Failed
    | Stop
    | Stopped
    | Drained
    | ReadEnded
    | Notify
    | Granted
    | Bye
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes | bytearray | memoryview) -> Message:
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a message: {error}") from error
    return message


def pack_addresses(addresses: Vector) -> bytes:
    return addresses.astype(_LITTLE, copy=False).tobytes()


def pack_runs(addresses: Vector, lengths: Vector) -> tuple[bytes, bytes, int]:
    """The fields `addresses`, `lengths` and `uniform` of a `Post`."""
    uniform = len(lengths) == 1 or bool(len(lengths)) and bool((lengths == lengths[0]).all())
    return (
        pack_addresses(addresses),
        b"" if uniform else pack_addresses(lengths),
        int(lengths[0]) if uniform else 0,
    )


def unpack_runs(post: Post) -> tuple[Vector, Vector]:
    """Addresses and lengths, (R,) uint64 each.

    Raises:
        ProtocolError: they do not belong together, a run is empty, or all is absurdly long.
    """
    if len(post.addresses) % 8 or len(post.lengths) % 8:
        raise ProtocolError("torn descriptors")
    addresses = _unpack(post.addresses)
    if post.uniform:
        if not 0 < post.uniform <= MAX_TRANSFER_BYTES:
            raise ProtocolError("a length out of range")
        lengths = np.array([post.uniform], np.uint64)
        if len(addresses) == 1:
            return addresses, lengths
        lengths = lengths.repeat(len(addresses))
        if len(lengths) * post.uniform > MAX_TRANSFER_BYTES:
            raise ProtocolError("a transfer out of range")
        return addresses, lengths
    else:
        lengths = _unpack(post.lengths)
    if len(lengths) != len(addresses) or not lengths.all():
        raise ProtocolError("runs without lengths")
    if len(lengths) and int(lengths.max()) * len(lengths) > MAX_TRANSFER_BYTES * 1024:
        raise ProtocolError("a transfer out of range")
    if int(lengths.sum()) > MAX_TRANSFER_BYTES:
        raise ProtocolError("a transfer out of range")
    return addresses, lengths


def unpack_sources(post: Post) -> Vector:
    """Where the bytes of a write are at the dialer, (R,) uint64.

    Raises:
        ProtocolError: not as many as `addresses`.
    """
    if len(post.sources) != len(post.addresses):
        raise ProtocolError("runs without sources")
    return _unpack(post.sources)


def _unpack(packed: bytes) -> Vector:
    return np.frombuffer(packed, _LITTLE).astype(np.uint64, copy=False)


# Refusals cross the wire by NIXL's status values.
_CODES: Final = {
    nixlBackendError: -3,
    nixlNotFoundError: -4,
    nixlNotAllowedError: -6,
}


def refusal_code(error: Exception) -> int:
    return _CODES[type(error)]


def refusal(code: int, text: str) -> Exception:
    for kind, value in _CODES.items():
        if value == code:
            return kind(text)
    return nixlBackendError(f"refused with status {code}: {text}")
