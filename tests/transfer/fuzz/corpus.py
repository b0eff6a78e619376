"""What two real agents say to each other, as inputs for the fuzzer.

python -m tests.transfer.fuzz.corpus FOLDER
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import msgspec
import numpy as np

import pd_transfer as nixl
from pd_transfer import metadata
from pd_transfer.accepted import AcceptedLink
from pd_transfer.dialed import DialedLink
from pd_transfer.link import Link
from pd_transfer.messages import Identity, Message, Sealed, decode, encode
from pd_transfer.tcp_wire import _HEADER, _MAGIC, TcpWire
from pd_transfer.ucx import UcxOptions
from pd_transfer.wire import Receiving
from tests.transfer.fuzz.harness import SECRET, Do, Scene, peer, step, victim
from tests.transfer.node import eventually

Network = Literal["auto", "network"]


class _Ears:
    """Everything that reaches the links of this process, as steps."""

    def __init__(self, stack: ExitStack) -> None:
        self.greetings: defaultdict[Link, bytes] = defaultdict(bytes)
        self.steps: defaultdict[Link, bytes] = defaultdict(bytes)
        received, message_read = Link._received, TcpWire._message_read

        def hear(link: Link, message: Message, body: bytes) -> None:
            heard = self.steps if link.proven else self.greetings
            heard[link] += step(Do.FRAME, _of_nobody(body)) + step(Do.TURN)
            received(link, message, body)

        def take(wire: TcpWire, job: Receiving) -> None:
            header = _HEADER.pack(_MAGIC, job.next - 1, job.id, wire._payload)
            link: Link = wire._broken.__self__  # type: ignore[attr-defined]
            self.steps[link] += step(Do.DATA, header + bytes(wire._payload))
            message_read(wire, job)

        stack.enter_context(patch.object(Link, "_received", hear))
        stack.enter_context(patch.object(TcpWire, "_message_read", take))


def _of_nobody(body: bytes) -> bytes:
    """The harness puts its own process in the place of one that has no number."""
    message = decode(body)
    if not isinstance(message, Sealed):
        return body
    inner = decode(message.body)
    if isinstance(inner, Identity):
        inner = msgspec.structs.replace(inner, pid=0, probe=b"", host="")
    return encode(Sealed(b"", encode(inner)))


class _Pair:
    def __init__(self, stack: ExitStack, network: Network) -> None:
        self._stack = stack
        options = UcxOptions(transport=network, network="tcp")
        self.i, self.t = (self._agent(name, options) for name in ("peer", "victim"))
        self.i.register_memory(peer.rows, "DRAM")
        self.registered = self.t.register_memory(victim.rows, "DRAM")
        self.i.add_remote_agent(self.t.get_agent_metadata())
        self.i.send_notif("victim", b"hello")
        eventually(self.t.get_new_notifs)

    def _agent(self, name: str, options: UcxOptions) -> nixl.nixl_agent:
        made = nixl.agent("ucx", name=name, secret=SECRET, options=options)
        self._stack.callback(made.close)
        made._state.generation = bytes(16)  # the harness's
        return made

    def handle(
        self, operation: str, pieces: int = 1, length: int = 100, message: bytes = b""
    ) -> nixl.nixl_xfer_handle:
        sides = []
        for name, base in (("", peer.regions[1]), ("victim", victim.regions[0])):
            rows = np.zeros((pieces, 3), np.uint64)
            rows[:, 0] = base + np.arange(pieces) * 2 * length
            rows[:, 1] = length
            sides.append(self.i.prep_xfer_dlist(name, rows, "DRAM"))
        order = np.arange(pieces)
        return self.i.make_prepped_xfer(operation, sides[0], order, sides[1], order, message)

    def move(self, *what: Any) -> None:
        handle = self.handle(*what)
        self.i.transfer(handle)
        eventually(lambda: self.i.check_xfer_state(handle) == "DONE")

    def settle(self) -> None:
        eventually(lambda: not self.i.statistics().transfers_active)
        eventually(lambda: not self.t._state.regions.busy())


def _pages(pair: _Pair) -> None:
    for operation in ("WRITE", "READ"):
        for message in (b"", b"n"):
            pair.move(operation, 1, 100, message)


def _scattered(pair: _Pair) -> None:
    for operation in ("WRITE", "READ"):
        pair.move(operation, 7, 3000, b"all of it")


def _refused(pair: _Pair) -> None:
    pair.t.deregister_memory(pair.registered)
    for operation in ("WRITE", "READ"):
        handle = pair.handle(operation)
        with suppress(nixl.nixlNotFoundError):  # told at once, or not
            pair.i.transfer(handle)
        pair.settle()


def _aborted(pair: _Pair) -> None:
    with pair.t._backend.loop.turn:  # type: ignore[attr-defined]
        for operation in ("WRITE", "READ"):
            handle = pair.handle(operation, 7, 3000)
            pair.i.transfer(handle)
            pair.i.abort(handle)
    pair.settle()


def _left(pair: _Pair) -> None:
    pair.i.transfer(pair.handle("WRITE"))
    pair.i.remove_remote_agent("victim")
    pair.settle()


CONVERSATIONS: Final[tuple[Callable[[_Pair], None], ...]] = (
    _pages,
    _scattered,
    _refused,
    _aborted,
    _left,
)


def seeds() -> list[bytes]:
    """One input a side of a conversation, and one of an acceptor's from the greeting on."""
    found: list[bytes] = []
    networks: tuple[Network, ...] = ("auto", "network")
    for network in networks:
        for conversation in CONVERSATIONS:
            with ExitStack() as stack:
                ears = _Ears(stack)
                pair = _Pair(stack, network)
                conversation(pair)
                pair.settle()
            for link, steps in ears.steps.items():
                tcp = network == "network"
                if isinstance(link, DialedLink):
                    found.append(bytes([Scene.ISSUING_TCP if tcp else Scene.ISSUING]) + steps)
                elif isinstance(link, AcceptedLink):
                    found.append(bytes([Scene.SERVING_TCP if tcp else Scene.SERVING]) + steps)
                    found.append(bytes([Scene.ACCEPTING]) + ears.greetings[link] + steps)
            about = pair.t._metadata()
            found.append(bytes([Scene.METADATA]) + metadata.encode(about))
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds():
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


if __name__ == "__main__":
    main()
