"""The data connection between hosts: who may open one, and what it may carry."""

from __future__ import annotations

import math
import queue
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_transfer import agent, tcp_wire
from pd_transfer.dial import proof
from pd_transfer.loop import Loop
from pd_transfer.messages import HEADER, Attach, encode
from pd_transfer.runs import IN_PLACE
from pd_transfer.tcp_wire import TcpWire
from pd_transfer.ucx import UcxOptions, _fabric
from pd_transfer.wire import Receiving, Sending
from tests.transfer.conftest import SECRET
from tests.transfer.node import Node, eventually
from tests.transfer.test_ucx import _address, _closed_by_peer

HEAD = struct.Struct("<4sIQQ")


class End:
    """One wire in a loop of its own; what it says of itself, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = Loop("wire")
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.wire = TcpWire(self.loop, self._broken)
        self.wire.attach(sock)
        self.loop.start()

    def _broken(self, reason: str) -> None:
        self.wire.destroy()
        self.said.put("broken")

    def send(self, id: int, data: np.ndarray[Any, Any], rows: Any) -> Sending:
        job = Sending(id, *table(data, rows), IN_PLACE, lambda: self.said.put(f"sent {id}"))
        self.loop.call(lambda: self.wire.send(job))
        return job

    def receive(self, id: int, data: np.ndarray[Any, Any], rows: Any, **how: Any) -> Receiving:
        def ended() -> None:
            self.said.put(f"received {id}")

        job = Receiving(id, *table(data, rows), IN_PLACE, ended, **how)
        self.loop.call(lambda: self.wire.receive(job))
        return job

    def told(self) -> str:
        return self.said.get(timeout=30)

    def close(self) -> None:
        self.loop.stop(self.wire.destroy)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def table(data: np.ndarray[Any, Any], rows: Any) -> tuple[Any, Any]:
    addresses = np.array([data.ctypes.data + start for start, _ in rows], np.uint64)
    return addresses, np.array([length for _, length in rows], np.uint64)


@pytest.fixture
def ends(later: Callable[[Any], Any]) -> tuple[End, End]:
    one, other = tcp_pair()
    return later(End(one)), later(End(other))


def test_scattered_runs_of_two_transfers_arrive(ends: tuple[End, End]) -> None:
    a, b = ends
    source = np.random.default_rng(1).integers(0, 256, 12 << 20, np.uint8)
    target = np.zeros_like(source)
    lengths = [3, 200_000, 1, 5 << 20, 70_000, 17] * 2
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    forth = list(zip(starts, lengths, strict=True))
    here, there = forth[:6], forth[6:]
    # Announced only after the bytes are on their way, and in the other order.
    a.send(1, source, here)
    a.send(2, source, there)
    b.receive(1, target, here)
    b.receive(2, target, there)
    assert {b.told(), b.told()} == {"received 1", "received 2"}
    assert {a.told(), a.told()} == {"sent 1", "sent 2"}
    end = starts[-1] + lengths[-1]
    assert np.array_equal(target[:end], source[:end])
    assert not target[end:].any()


def test_what_is_refused_is_taken_off_and_thrown_away(ends: tuple[End, End]) -> None:
    a, b = ends
    source, target = np.full(1 << 20, 7, np.uint8), np.zeros(1 << 20, np.uint8)
    a.send(1, source, [(0, 1 << 20)])
    refused = b.receive(1, target, [(0, 1 << 20)], discard=True)
    a.send(2, source, [(0, 9)])
    b.receive(2, target, [(0, 9)])
    assert b.told() == "received 2"
    b.loop.call(lambda: b.wire.stop_receiving(refused, 1))
    assert b.told() == "received 1"
    assert target[:9].tolist() == [7] * 9
    assert not target[9:].any()


def test_the_end_of_the_other_side_is_told_also_while_a_message_is_held() -> None:
    one, other = tcp_pair()
    other.sendall(HEAD.pack(b"PDT1", 0, 5, 100))
    # Before the header is read: an end that comes later is told by the control connection alone.
    other.close()
    end = End(one)
    try:
        assert end.told() == "broken"
    finally:
        end.close()


def test_the_thread_is_woken_by_portions_and_never_waits_for_more_than_is_due(
    later: Callable[[Any], Any],
) -> None:
    one, other = tcp_pair()
    end = later(End(one))
    target = np.zeros(1 << 20, np.uint8)
    end.receive(1, target, [(0, 1 << 20)])

    def wanted() -> int:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    assert wanted() == 1  # a header
    other.sendall(HEAD.pack(b"PDT1", 0, 1, 1 << 20) + b"7")
    eventually(lambda: wanted() > 1000)
    portion = wanted()
    # The rest of what is due is less than a portion: were that waited for, it would be for ever.
    other.sendall(b"7" * ((1 << 20) - 10_001))
    eventually(lambda: wanted() == 10_000 < portion)
    other.sendall(b"7" * 10_000)
    assert end.told() == "received 1"
    assert (target == ord("7")).all()
    eventually(lambda: wanted() == 1)
    other.close()


@pytest.mark.parametrize(
    ("microseconds", "limited"), [(0, True), (60, True), (70, False), (5000, False)]
)
def test_little_is_under_way_to_a_peer_nearby_and_enough_to_one_far_away(
    monkeypatch: pytest.MonkeyPatch,
    later: Callable[[Any], Any],
    microseconds: int,
    limited: bool,
) -> None:
    one, other = tcp_pair()
    by_itself = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert tcp_wire._round_trip(one) < tcp_wire._NEARBY  # the kernel's word on this loopback
    monkeypatch.setattr(tcp_wire, "_round_trip", lambda sock: microseconds / 1e6)
    later(End(one))
    later(End(other))
    allowed = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if limited:
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        assert allowed == 2 * min(384 * 1024, most)
    else:
        assert allowed == by_itself


def test_a_kernel_that_does_not_say_how_far_a_peer_is_leaves_it_far() -> None:
    class Old:
        def getsockopt(self, *_: int) -> bytes:
            return bytes(104)

    assert tcp_wire._round_trip(Old()) == math.inf  # type: ignore[arg-type]
    one, other = socket.socketpair()
    assert tcp_wire._round_trip(one) == math.inf
    one.close()
    other.close()


def headers() -> st.SearchStrategy[bytes]:
    magic = st.sampled_from([b"PDT1", b"PDT0", b"\0\0\0\0"])
    index, id = st.integers(0, 3), st.integers(0, 4)
    length = st.one_of(st.sampled_from([64, 63, 65]), st.integers(0, 2**64 - 1))
    return st.builds(HEAD.pack, magic, index, id, length)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.one_of(headers(), st.binary(max_size=80)), max_size=6))
def test_nonsense_lands_in_no_other_memory(parts: list[bytes]) -> None:
    memory = np.zeros(192, np.uint8)
    one, other = tcp_pair()
    end = End(one)
    try:
        end.receive(1, memory, [(64, 64)])
        other.sendall(b"".join(parts))
        other.close()
        # Or it waits for the announcement of what it has been sent; the link's end ends that.
        eventually(lambda: end.wire._held or end.wire._sock is None)
        assert not memory[:64].any()
        assert not memory[128:].any()
    finally:
        end.close()
        other.close()


def test_a_data_connection_needs_a_ticket_and_the_secret(later: Callable[[Any], Any]) -> None:
    options = UcxOptions(transport="network", network="tcp")
    i, t = (
        later(Node(later(agent("ucx", name=name, secret=SECRET, options=options)), seed=seed))
        for seed, name in enumerate("it")
    )
    ticket = b"t" * 32
    for message in (
        Attach(b"", proof(SECRET, b"dialer", b"")),
        Attach(ticket, proof(SECRET, b"dialer", ticket)),
        Attach(ticket, b""),
    ):
        with socket.create_connection(_address(t)) as sock:
            body = encode(message)
            sock.sendall(HEADER.pack(len(body)) + body)
            assert _closed_by_peer(sock)
    i.add(t.metadata())
    i.write_everything("t", t.address(), i.memory.nbytes)
    eventually(lambda: i.agent.check_xfer_state(i.handle) == "DONE")
    assert t.content() == i.content()
    # The ticket has been used up.
    (link,) = t.agent._backend._links
    assert link.ticket == b""


def test_the_network_is_chosen_by_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PD_TRANSFER_NETWORK", raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr("pathlib.Path.is_dir", lambda path: True)
    devices: list[str] = []
    monkeypatch.setattr("pathlib.Path.iterdir", lambda path: iter(devices))

    def chosen(**options: Any) -> str:
        return _fabric(UcxOptions(**options)).name

    assert chosen() == "TCP"
    devices.append("mlx5_0")
    assert chosen() == "NETWORK"
    assert chosen(settings={"TLS": "tcp,self"}) == "TCP"
    assert chosen(settings={"TLS": "rc,cuda"}) == "NETWORK"
    assert chosen(settings={"TLS": "^rc"}) == "TCP"
    assert chosen(network="tcp") == "TCP"
    monkeypatch.setenv("PD_TRANSFER_NETWORK", "tcp")
    assert chosen() == "TCP"
    assert chosen(network="ucx") == "NETWORK"
    monkeypatch.setenv("PD_TRANSFER_NETWORK", "rdma")
    with pytest.raises(ValueError, match="PD_TRANSFER_NETWORK"):
        chosen()
    with pytest.raises(ValueError, match="network"):
        UcxOptions(network="rdma")  # type: ignore[arg-type]
