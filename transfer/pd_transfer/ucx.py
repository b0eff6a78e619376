"""The UCX backend: links to peers, and what is known of the peers' lives."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

# UCX warns about a memory hook on every start where there is no GPU; read when it is loaded.
os.environ.setdefault("UCX_LOG_LEVEL", "error")

from pd_transfer.accepted import AcceptedLink
from pd_transfer.cuda import device_count, device_memory
from pd_transfer.descriptors import Rows
from pd_transfer.dialed import DialedLink
from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlMismatchError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from pd_transfer.fatal import survive
from pd_transfer.handshake import Probe, Transport, allow_tracing
from pd_transfer.link import Link
from pd_transfer.loop import Loop
from pd_transfer.messages import Notify
from pd_transfer.metadata import Metadata
from pd_transfer.regions import HOST
from pd_transfer.state import Backend, PeerState, State, Transfer
from pd_transfer.ucx_wire import open_context, sees_devices

_TRANSPORTS: Final = {
    "auto": Transport.CROSS_MEMORY,
    "cross-memory": Transport.CROSS_MEMORY,
    "shared-memory": Transport.SHARED_MEMORY,
    "network": Transport.NETWORK,
}
_FABRICS: Final = {"tcp": Transport.TCP, "ucx": Transport.NETWORK}
# UCX's names of transports for RDMA; what it has else between hosts is tcp.
_RDMA: Final = ("rc", "ud", "dc", "srd", "ib", "gga")


@dataclass(frozen=True)
class UcxOptions:
    """
    Args:
        host: where the control connections are accepted; loopback unless told otherwise.
        port: 0 takes a free one.
        advertise: the address that peers are told, `host` if empty. Needed for a wildcard `host`.
        transport: the best one to use. "auto" and "cross-memory" read the peer's memory directly
            on one host, "shared-memory" copies through segments, "network" behaves as if every
            peer were on another host.
        network: what joins hosts: "ucx", sockets of our own ("tcp"), or as suits the fabric: UCX
            where it may use RDMA here, else sockets, which are faster than UCX's. The environment's
            `PD_TRANSFER_NETWORK` takes the place of "auto". Where two sides differ, sockets.
        connect_timeout: seconds until a peer that does not answer at all counts as dead.
        settings: UCX's own, without the `UCX_` prefix, e.g. ``{"NET_DEVICES": "lo"}``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    transport: Literal["auto", "cross-memory", "shared-memory", "network"] = "auto"
    network: Literal["auto", "ucx", "tcp"] = "auto"
    connect_timeout: float = 10.0
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"transport is one of {list(_TRANSPORTS)}, not {self.transport!r}")
        if self.network not in ("auto", *_FABRICS):
            raise ValueError(f"network is auto, ucx or tcp, not {self.network!r}")
        if self.host in ("", "0.0.0.0", "::") and not self.advertise:
            raise ValueError("a wildcard host needs an address to advertise")


class _Address(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    key: bytes
    """What to prove knowledge of, where agents were given no secret of their own."""


class UcxBackend(Backend):
    kind = "UCX"
    wire_name = "UCX"

    def __init__(self, state: State, options: UcxOptions, secret: bytes | None) -> None:
        self.state = state
        self.host = options.host
        self.fabric = _fabric(options)
        self.transport = _TRANSPORTS[options.transport]
        if options.transport == "network":
            self.transport = self.fabric
        self.loop = Loop(f"pd_transfer {state.name}")
        self.probe = Probe()
        self._options = options
        self._secret = secret
        self._key = secrets.token_bytes(32) if secret is None else b""
        self._contexts: dict[tuple[Transport, bool], Any] = {}
        self._opening = threading.Lock()
        self._dialed: dict[str, DialedLink] = {}
        self._links: set[Link] = set()
        self._lost: dict[str, Exception] = {}
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._listener = socket.create_server(
            (options.host, options.port), family=family, backlog=1024
        )
        self._listener.setblocking(False)
        self._port: int = self._listener.getsockname()[1]
        survive()
        allow_tracing()
        self.loop.watch(self._listener.fileno(), self._accept)
        self.loop.start()

    # For the application's threads.

    def memory_types(self) -> list[nixl_mem_t]:
        vram = [nixl_mem_t.VRAM_SEG] if device_count() else []
        return [nixl_mem_t.DRAM_SEG, *vram]

    def register(self, kind: nixl_mem_t, rows: Rows) -> None:
        if kind == HOST.kind:
            return
        for device in set(rows[:, 2].tolist()):
            memory = device_memory(device)
            memory.require(rows[rows[:, 2] == device])
            beside = self.transport >= Transport.SHARED_MEMORY
            transport = Transport.SHARED_MEMORY if beside else Transport.NETWORK
            with memory.current():
                context = self.context(transport, devices=True)
            if not sees_devices(context):
                raise nixlBackendError(
                    "UCX has no CUDA transports here: UCX_TLS leaves them out, or its library for"
                    " CUDA cannot be loaded (UCX_LOG_LEVEL=debug tells why)"
                )

    def connection(self) -> bytes:
        host = self._options.advertise or self._options.host
        return msgspec.msgpack.encode(_Address(host, self._port, self._key))

    def connect(self, peer: Metadata) -> None:
        assert peer.connection is not None
        try:
            address = msgspec.msgpack.decode(peer.connection, type=_Address)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise nixlMismatchError(f"{peer.name!r} has no address: {error}") from error
        secret = address.key if self._secret is None else self._secret
        if not secret:
            raise nixlMismatchError(f"{peer.name!r} demands a secret and this agent has none")
        link = DialedLink(self, secret, peer, (address.host, address.port))
        self._dialed[peer.name] = link
        self._links.add(link)
        self._lost.pop(peer.name, None)
        self._call(lambda: link.dial(self._options.connect_timeout))

    def disconnect(self, peer: str) -> None:
        link = self._dialed.pop(peer, None)
        if link is not None:
            self.loop.call(link.leave)

    def post(self, transfer: Transfer) -> None:
        link = self._dialed.get(transfer.peer)
        if link is None or link.generation != transfer.generation or not link.post_now(transfer):
            self._call(lambda: self._post(transfer), transfer)

    def wait(self, transfer: Transfer, seconds: float) -> bool:
        link = self._dialed.get(transfer.peer)
        # A callback is promised the loop's thread.
        if link is None or self.state.callback is not None:
            return False
        return link.take_here(transfer, seconds)

    def abort(self, transfer: Transfer) -> None:
        self.loop.call(lambda: self._abort(transfer))

    def notify(self, peer: str, message: bytes) -> None:
        link = self._dialed.get(peer)
        if link is None:
            raise self._lost.get(peer) or nixlNotFoundError(f"unknown agent {peer!r}")
        notice = Notify(message)
        if not link.notify_now(notice):
            self._call(lambda: link.notify(notice))

    def peer_state(self, peer: str) -> PeerState | None:
        if not self.peer_is_quiet(peer):
            return "alive"
        return "dead" if peer in self._lost else None

    def why_lost(self, peer: str) -> Exception | None:
        return self._lost.get(peer)

    def peer_is_quiet(self, peer: str) -> bool:
        # An accepted link counts from when its dialer has proved itself; nothing lands before. Each
        # counts until it has been closed wholly and has given back all that it held.
        return not any(
            link.peer == peer and (link.proven or isinstance(link, DialedLink))
            for link in list(self._links)
        )

    def close(self) -> None:
        self.loop.stop(self._shut_down)

    def _call(self, function: Callable[[], None], transfer: Transfer | None = None) -> None:
        if not self.loop.call(function):
            error = nixlRemoteDisconnectError(f"agent {self.state.name!r} is closed")
            if transfer is None:
                raise error
            self.state.finished(transfer, error)

    def context(self, transport: Transport, devices: bool = False) -> Any:
        with self._opening:
            known = self._contexts.get((transport, devices))
            if known is None:
                known = open_context(transport, self._options.settings, devices)
                self._contexts[transport, devices] = known
            return known

    # For the loop's thread.

    def opened(self, link: Link) -> None:
        self._lost.pop(link.peer, None)

    def lost(self, link: Link, error: Exception) -> None:
        if link not in self._links:
            return
        peer, generation = link.peer, link.generation
        stranger = isinstance(link, AcceptedLink) and not link.open
        if stranger:
            self._close(link, error)
            return
        self._lost[peer] = error
        for other in list(self._links):
            if (other.peer, other.generation) == (peer, generation):
                self._close(other, error)
        self.state.lost(peer, generation)

    def forget(self, link: Link) -> None:
        self._close(link, nixlCancelledError(f"{link.peer!r} was removed"))

    def _close(self, link: Link, error: Exception) -> None:
        link.close(error)
        self._links.discard(link)
        if self._dialed.get(link.peer) is link:
            del self._dialed[link.peer]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            secret = self._key if self._secret is None else self._secret
            self._links.add(AcceptedLink(self, secret, sock))

    def ticketed(self, ticket: bytes) -> AcceptedLink | None:
        for link in self._links:
            if isinstance(link, AcceptedLink) and link.ticket and link.ticket == ticket:
                return link
        return None

    def _post(self, transfer: Transfer) -> None:
        link = self._dialed.get(transfer.peer)
        if link is not None and link.generation == transfer.generation:
            link.submit(transfer)
            return
        error = self._lost.get(transfer.peer)
        self.state.finished(transfer, error or nixlNotFoundError(f"{transfer.peer!r} was removed"))

    def _abort(self, transfer: Transfer) -> None:
        for link in list(self._links):
            if isinstance(link, DialedLink) and link.peer == transfer.peer:
                link.abort(transfer)

    def _shut_down(self) -> None:
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()
        error = nixlRemoteDisconnectError(f"agent {self.state.name!r} was closed")
        for link in list(self._links):
            self._close(link, error)
        self._contexts.clear()


def _fabric(options: UcxOptions) -> Transport:
    """What this agent would use between hosts.

    Raises:
        ValueError: `PD_TRANSFER_NETWORK` is set to something else than its values.
    """
    wanted: str = options.network
    if wanted == "auto":
        wanted = os.environ.get("PD_TRANSFER_NETWORK", "auto")
    if wanted in _FABRICS:
        return _FABRICS[wanted]
    if wanted != "auto":
        raise ValueError(f"PD_TRANSFER_NETWORK is auto, ucx or tcp, not {wanted!r}")
    return Transport.NETWORK if _rdma(options.settings) else Transport.TCP


def _rdma(settings: Mapping[str, str]) -> bool:
    """Whether this host has RDMA, and UCX has not been told to leave it alone."""
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return False
    allowed = settings.get("TLS", os.environ.get("UCX_TLS", "all"))
    names = allowed.removeprefix("^").split(",")
    named = any(name.startswith(_RDMA) for name in names)
    return not named if allowed.startswith("^") else named or "all" in names
