"""The part of `nixl_agent` that is about metadata: its own, its peers', and carrying it by TCP."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pd_transfer import metadata as wire_metadata
from pd_transfer.base import AgentBase, as_name
from pd_transfer.descriptors import nixlRegDList, nixlXferDList
from pd_transfer.enums import DEFAULT_COMM_PORT
from pd_transfer.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotAllowedError,
    nixlNotFoundError,
)
from pd_transfer.listener import Fetch, Invalidate, Listener, Request, Send, ask, checked
from pd_transfer.metadata import Metadata
from pd_transfer.regions import locate
from pd_transfer.state import Peer

logger: Final = logging.getLogger("pd_transfer")


class MetadataCalls(AgentBase):
    _listener: Listener | None

    def get_agent_metadata(self) -> bytes:
        """A snapshot for `add_remote_agent` elsewhere: register memory before."""
        return wire_metadata.encode(self._metadata())

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Of the registrations in `descs` only; of none, if empty: connection information alone.

        Raises:
            nixlNotFoundError: a row is not registered like this.
        """
        self._check_backends(backends)
        whole = self._metadata()
        wanted = set(self._state.regions.find(descs.getType(), descs.rows))
        return wire_metadata.encode(
            msgspec.structs.replace(
                whole,
                connection=whole.connection if inc_conn_info or descs.isEmpty() else None,
                regions=[region for region in whole.regions if region.id in wanted],
                partial=True,
            )
        )

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Load a peer's metadata and start connecting. Loading newer metadata of it is legal.

        Returns:
            The peer's name as bytes, as upstream's binding does.

        Raises:
            nixlMismatchError: not metadata, or of another version.
            nixlInvalidParamError: this agent's own.
            nixlBackendError: no common backend.
            nixlNotFoundError: partial metadata of an agent of which no connection is known.
            nixlNotAllowedError: another agent of the same name is loaded; remove that first.
        """
        loaded = wire_metadata.decode(metadata)
        if loaded.name == self.name:
            raise nixlInvalidParamError("an agent is not its own remote agent")
        if loaded.backend != self._backend.wire_name:
            raise nixlBackendError(f"{loaded.name!r} speaks {loaded.backend} only")
        with self._state.lock:
            known = self._state.peers.get(loaded.name)
            if known is None:
                if loaded.connection is None:
                    raise nixlNotFoundError(f"no connection to {loaded.name!r} is known yet")
                self._backend.connect(loaded)
                self._state.peers[loaded.name] = Peer(loaded, next(self._epochs))
                return loaded.name.encode()
            before = known.metadata
            if before.generation != loaded.generation or not self._backend.same_place(
                before.connection, loaded.connection
            ):
                raise nixlNotAllowedError(f"another agent named {loaded.name!r} is loaded")
            regions = {region.id: region for region in before.regions} if loaded.partial else {}
            regions |= {region.id: region for region in loaded.regions}
            merged = msgspec.structs.replace(
                loaded,
                connection=loaded.connection or before.connection,
                regions=list(regions.values()),
            )
            self._backend.refresh(merged)
            self._state.peers[loaded.name] = Peer(merged, known.epoch)
        return loaded.name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Abort what is under way to the peer and forget it. Never raises, as upstream."""
        with self._state.lock:
            if self._state.peers.pop(as_name(agent), None) is not None:
                self._backend.disconnect(as_name(agent))

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Whether the peer is loaded and, if given, its metadata covers `descs`."""
        peer = self._state.peers.get(as_name(agent))
        if peer is None:
            return False
        if descs is not None:
            try:
                locate(peer.metadata.regions, descs.getType(), descs.rows)
            except nixlNotFoundError:
                return False
        return True

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """Nothing to do: connecting begins with `add_remote_agent`.

        Raises:
            nixlNotFoundError: unknown agent.
            nixlRemoteDisconnectError: it died.
        """
        self._check_backends(backends)
        self._peer(as_name(remote_agent))

    # By TCP. Each returns at once, as upstream; a failure is logged.

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Have the agent that listens there load this agent's metadata.

        Raises:
            nixlInvalidParamError: no address: there is no central metadata server here.
        """
        request = Send(self.get_agent_metadata())
        self._ask(ip_addr, port, request, lambda answer: None)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """As `send_local_metadata`, of `get_partial_agent_metadata`. `label` has no effect."""
        request = Send(self.get_partial_agent_metadata(descs, inc_conn_info, backends))
        self._ask(ip_addr, port, request, lambda answer: None)

    def fetch_remote_metadata(
        self,
        remote_agent: str | bytes,
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Load the metadata of the agent that listens there; `check_remote_metadata` tells when.

        Raises:
            nixlInvalidParamError: no address.
        """
        name = as_name(remote_agent)
        self._ask(
            ip_addr, port, Fetch(name), lambda answer: self.add_remote_agent(checked(answer, name))
        )

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Have the agent that listens there remove this one.

        Raises:
            nixlInvalidParamError: no address.
        """
        request = Invalidate(self.name, self._state.generation)
        self._ask(ip_addr, port, request, lambda answer: None)

    @property
    def listen_port(self) -> int:
        """Extension: where metadata is accepted.

        Raises:
            nixlNotFoundError: the agent was not configured to listen.
        """
        if self._listener is None:
            raise nixlNotFoundError("enable_listen_thread was not asked for")
        return self._listener.port

    def generation_of(self, agent: str) -> bytes | None:
        """Extension: the generation of a loaded peer, None if it is not loaded."""
        peer = self._state.peers.get(agent)
        return None if peer is None else peer.metadata.generation

    def _listen(self, port: int) -> Listener:
        # Weakly: an agent that nobody holds any more must end, listening or not.
        return Listener(weakref.proxy(self), self._backend.host, port, self._secret or b"")

    def _metadata(self) -> Metadata:
        return Metadata(
            version=wire_metadata.VERSION,
            name=self.name,
            generation=self._state.generation,
            backend=self._backend.wire_name,
            connection=self._backend.connection(),
            regions=self._state.regions.snapshot(),
        )

    def _ask(
        self, address: str, port: int, request: Request, use: Callable[[bytes], object]
    ) -> None:
        if not address:
            raise nixlInvalidParamError("an address is needed: no metadata server is supported")
        secret = self._secret or b""

        def work() -> None:
            try:
                use(ask((address, port), secret, request))
            except Exception as error:  # NIXL's errors have no common base
                kind = type(request).__name__
                logger.warning("%s of metadata at %s:%s failed: %s", kind, address, port, error)

        threading.Thread(target=work, name="pd_transfer metadata request", daemon=True).start()
