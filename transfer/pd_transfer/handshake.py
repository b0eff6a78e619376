"""Who the other side is: proof of the shared secret, and which transport joins two processes."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import Final

from pd_transfer.errors import nixlNotAllowedError
from pd_transfer.messages import Identity, Message, Sealed, decode, encode

logger: Final = logging.getLogger("pd_transfer")

_PR_SET_PTRACER: Final = 0x59616D61
_NONCE: Final = 32
_PROBE: Final = 16


class Transport(enum.IntEnum):
    """From worst to best; two processes use the best that both can."""

    TCP = 0
    """Sockets of our own."""
    NETWORK = 1
    """What UCX finds: for fabrics with RDMA."""
    SHARED_MEMORY = 2
    CROSS_MEMORY = 3


class Transcript:
    """All that both sides said, as either of them saw it; a proof covers all of it.

    Replaying one is useless, because each side contributed a fresh nonce, and so is reflecting
    it, because the roles differ.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._said = hashlib.sha256()

    def add(self, body: bytes) -> None:
        self._said.update(len(body).to_bytes(8, "little") + body)

    def seal(self, role: bytes, message: Message) -> Sealed:
        body = encode(message)
        sealed = Sealed(self._mac(role, body), body)
        self.add(body)
        return sealed

    def open(self, role: bytes, sealed: Sealed) -> Message:
        """
        Raises:
            nixlNotAllowedError: the sender does not know the secret.
        """
        if not hmac.compare_digest(self._mac(role, sealed.body), sealed.mac):
            raise nixlNotAllowedError("the other side does not know the secret")
        self.add(sealed.body)
        return decode(sealed.body)

    def _mac(self, role: bytes, body: bytes) -> bytes:
        return hmac.digest(self._secret, role + self._said.digest() + body, "sha256")


def nonce() -> bytes:
    return secrets.token_bytes(_NONCE)


@functools.cache
def host_id() -> str:
    """Equal for two processes that can share memory: one kernel, one user, the same namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc", "user")]
    return " ".join([boot, str(os.getuid()), *spaces])


class Probe:
    """A few secret bytes that a peer may try to read out of this process, as cma would."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(secrets.token_bytes(_PROBE), _PROBE)

    def identity(self, transport: Transport, fabric: Transport = Transport.TCP) -> Identity:
        return Identity(
            host=host_id(),
            pid=os.getpid(),
            probe_address=ctypes.addressof(self._bytes),
            probe=self._bytes.raw,
            transport=int(transport),
            fabric=int(fabric),
        )


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc: Final = ctypes.CDLL(None, use_errno=True)


def allow_tracing() -> None:
    """Let sibling processes read our memory where Yama would forbid it. Harmless elsewhere."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)


def best_transport(own: Transport, fabric: Transport, peer: Identity) -> Transport:
    """The best transport towards a peer that we are able and allowed to use: on one host `own`,
    between hosts `fabric`."""
    if peer.host != host_id():
        return Transport(max(0, min(fabric, peer.fabric)))
    if min(own, peer.transport) < Transport.CROSS_MEMORY:
        return Transport(max(0, min(own, peer.transport)))
    if _can_read(peer):
        return Transport.CROSS_MEMORY
    _say_once()
    return Transport.SHARED_MEMORY


@functools.cache
def _say_once() -> None:
    logger.warning(
        "this process may not read its peers' memory (ptrace is restricted): "
        "transfers go through shared memory, with one more copy"
    )


def _can_read(peer: Identity) -> bool:
    buffer = ctypes.create_string_buffer(_PROBE)
    local = _Vector(ctypes.addressof(buffer), _PROBE)
    remote = _Vector(peer.probe_address, _PROBE)
    count = _libc.process_vm_readv(
        peer.pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), 0
    )
    return bool(count == _PROBE and hmac.compare_digest(buffer.raw, peer.probe))
