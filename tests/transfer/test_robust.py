"""Many random transfers, many deaths, much nonsense. Samples here, the long forms on request."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pd_transfer as nixl
from pd_transfer import messages
from pd_transfer import metadata as wire_metadata
from pd_transfer.handshake import Probe, Transcript, Transport, nonce
from pd_transfer.messages import HEADER, VERSION, Hello, Ready, decode, encode
from pd_transfer.ucx import UcxOptions
from tests.transfer.conftest import SECRET
from tests.transfer.node import Node, RemoteNode, eventually

MIB = 1 << 20
SIZE = 8 * MIB


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Pool:
    """An agent of this process and what its memory must hold."""

    def __init__(self, agent: nixl.nixl_agent, seed: int) -> None:
        self.agent = agent
        self.node = Node(agent, pages=1, page=SIZE, seed=seed)
        self.expected = self.node.memory.copy()


def pieces(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Disjoint pieces of odd sizes at either side, in unrelated orders, some of them neighbours."""
    count = int(rng.integers(1, 40))
    longest = int(rng.choice([64, 3000, 60_000, 100_000]))
    lengths = rng.integers(0, longest, count)
    gaps = rng.integers(0, 2, (2, count)) * rng.integers(0, 200, (2, count))
    order = rng.permutation(count) if rng.random() < 0.7 else np.arange(count)
    here = np.cumsum(lengths + gaps[0]) - lengths
    there = np.empty(count, np.int64)
    there[order] = np.cumsum(lengths[order] + gaps[1][order]) - lengths[order]
    return here, there, lengths


def rows(base: int, starts: Any, lengths: Any) -> Any:
    table = np.zeros((len(starts), 3), np.uint64)
    table[:, 0] = base + np.asarray(starts)
    table[:, 1] = lengths
    return table


@pytest.mark.parametrize("transport", ["auto", "network"])
@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_random_transfers_leave_exact_memory(
    later: Callable[[Any], Any], count: int, transport: Any
) -> None:
    tcp = {"NET_DEVICES": "lo", "TLS": "tcp,self"} if transport == "network" else {}
    options = UcxOptions(transport=transport, settings=tcp)
    pools = [
        Pool(later(nixl.agent("ucx", name=name, secret=SECRET, options=options)), seed)
        for seed, name in enumerate("abc")
    ]
    for one in pools:
        for other in pools:
            if one is not other:
                one.node.add(other.node.metadata())
    rng = np.random.default_rng(11)
    before: list[int] = []
    for turn in range(count):
        if turn == count // 4:
            before = [descriptors(), resident()]
        one, other = (pools[n] for n in rng.permutation(3)[:2])
        if rng.random() < 0.1:
            other = one  # loopback; pieces of one pool would overlap
        operation = str(rng.choice(["READ", "WRITE"]))
        here, there, lengths = pieces(rng)
        half = SIZE // 2 if other is one else 0
        lengths = np.minimum(lengths, 50_000) if half else lengths
        mine = one.agent.prep_xfer_dlist("", rows(one.node.address(), here, lengths), "DRAM")
        theirs = one.agent.prep_xfer_dlist(
            other.agent.name, rows(other.node.address() + half, there, lengths), "DRAM"
        )
        order = np.arange(len(lengths))
        handle = one.agent.make_prepped_xfer(operation, mine, order, theirs, order, b"%d" % turn)
        for _ in range(int(rng.integers(1, 3))):  # reposts
            one.agent.transfer(handle)
            if rng.random() < 0.1:
                # Released in flight: all, some or nothing of it lands, so look before going on.
                one.agent.release_xfer_handle(handle)
                agent = one.agent
                eventually(lambda agent=agent: agent.statistics().transfers_active == 0)
                for pool in pools:
                    pool.expected[:] = pool.node.memory
                break
            eventually(lambda a=one.agent, h=handle: a.check_xfer_state(h) == "DONE")
            for a, b, n in zip(here, there + half, lengths, strict=True):
                if operation == "WRITE":
                    other.expected[b : b + n] = one.expected[a : a + n]
                else:
                    one.expected[a : a + n] = other.expected[b : b + n]
        handle.release()
        if turn % 20 == 0 or turn == count - 1:
            for pool in pools:
                assert np.array_equal(pool.node.memory, pool.expected), f"after transfer {turn}"
                pool.node.notifications()
    for pool in pools:
        told = pool.agent.statistics()
        assert (told.handles_open, told.transfers_active) == (0, 0)
        pool.node.deregister()
    assert descriptors() <= before[0]
    assert resident() < before[1] + 64 * MIB


REPEATS = [
    2,
    pytest.param(100, marks=[pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("count", REPEATS)
def test_peers_killed_amid_transfers(later: Callable[[Any], Any], count: int) -> None:
    """A target killed while we write to it and read from it; an initiator, while it writes."""
    agent = later(nixl.agent("ucx", name="survivor", secret=SECRET))
    node = Node(agent, pages=32, page=MIB, seed=1)
    baseline: int | None = None
    for turn in range(count):
        peer = RemoteNode(name=f"p{turn}", secret=SECRET, options={}, pages=32, page=MIB, seed=2)
        try:
            node.add(peer.metadata())
            peer.add(node.metadata())
            agent.send_notif(f"p{turn}", b"met")
            eventually(peer.notifications)
            handles = []
            mine = agent.prep_xfer_dlist("", rows(node.address(), [0], [16 * MIB]), "DRAM")
            theirs = agent.prep_xfer_dlist(
                f"p{turn}", rows(peer.address(), [0], [16 * MIB]), "DRAM"
            )
            for operation in ("WRITE", "READ"):
                handles.append(agent.make_prepped_xfer(operation, mine, [0], theirs, [0]))
            peer.write_everything("survivor", node.address() + 16 * MIB, 16 * MIB)
            for handle in handles:
                agent.transfer(handle)
            if turn % 2:
                peer.stop()
            peer.kill()
            for handle in handles:
                try:
                    eventually(lambda h=handle: agent.check_xfer_state(h) == "DONE")
                except nixl.nixlRemoteDisconnectError:
                    pass
            eventually(lambda name=f"p{turn}": agent.peer_is_quiet(name))
            assert agent.peer_state(f"p{turn}") == "dead"
            # Nothing is held, nothing lands any more.
            node.deregister()
            before = node.digest()
            node.register()
            assert node.digest() == before
        finally:
            peer.close()
        del handles, mine, theirs
        if baseline is None:
            baseline = descriptors()
    assert baseline is not None
    assert descriptors() <= baseline


@pytest.mark.parametrize("count", REPEATS)
@pytest.mark.parametrize("place", ["same host", "another host"])
def test_peers_stopped_amid_transfers(
    later: Callable[[Any], Any], count: int, place: str, request: pytest.FixtureRequest
) -> None:
    """A stopped peer's pages stay held; it goes on where it was, or its transfers are aborted."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    prefix: list[str] = []
    if place == "another host":
        prefix, here, there = request.getfixturevalue("neighbour")
        ours, theirs = (
            {"host": address, "transport": "network", "network": "tcp"} for address in (here, there)
        )
    agent = later(nixl.agent("ucx", name="survivor", secret=SECRET, options=UcxOptions(**ours)))
    node = Node(agent, pages=32, page=MIB, seed=1)
    peer = later(
        RemoteNode(prefix, name="p", secret=SECRET, options=theirs, pages=32, page=MIB, seed=2)
    )
    healthy = later(Node(later(nixl.agent("ucx", name="h", secret=SECRET)), pages=2, page=MIB))
    node.add(peer.metadata())
    node.add(healthy.metadata())
    peer.add(node.metadata())
    mine = agent.prep_xfer_dlist("", rows(node.address(), [0], [32 * MIB]), "DRAM")
    theirs = agent.prep_xfer_dlist("p", rows(peer.address(), [0], [32 * MIB]), "DRAM")
    small = agent.prep_xfer_dlist("", rows(node.address(), [0], [MIB]), "DRAM")
    other = agent.prep_xfer_dlist("h", rows(healthy.address(), [0], [MIB]), "DRAM")
    for turn in range(count):
        peer.stop()
        try:
            handles = [
                agent.make_prepped_xfer(operation, mine, [0], theirs, [0])
                for operation in ("WRITE", "READ")
            ]
            for handle in handles:
                agent.transfer(handle)
            if turn % 2:
                for handle in handles:
                    agent.abort(handle)
            # case 7: another peer is served meanwhile.
            fine = agent.make_prepped_xfer("WRITE", small, [0], other, [0])
            agent.transfer(fine)
            eventually(lambda h=fine: agent.check_xfer_state(h) == "DONE")
            # case 8: what the stopped peer may still use is not given back.
            assert [agent.check_xfer_state(h) for h in handles] == ["PROC", "PROC"]
            with pytest.raises(nixl.nixlNotAllowedError):
                node.deregister()
            assert agent.peer_state("p") == "alive"
        finally:
            peer.resume()
        for handle in handles:
            try:
                # Also an aborted one, if the abort came too late.
                eventually(lambda h=handle: agent.check_xfer_state(h) == "DONE")
            except nixl.nixlCancelledError:
                assert turn % 2
    assert agent.statistics().transfers_active == 0
    node.deregister()
    eventually(lambda: peer.counters()["transfers_active"] == 0)

    def released() -> bool:
        # The last end of a transfer may still be on its way to the peer.
        try:
            peer.deregister()
        except RuntimeError as error:
            if "still use this memory" not in str(error):
                raise
            return False
        return True

    eventually(released)


class Mallory:
    """A peer that knows the secret and sends what it likes: a dialer made by hand."""

    def __init__(self, target: nixl.nixl_agent, transport: Transport) -> None:
        metadata = wire_metadata.decode(target.get_agent_metadata())
        assert metadata.connection is not None
        host, port, _ = msgspec.msgpack.decode(metadata.connection)
        self.sock = socket.create_connection((host, port), timeout=30)
        self._transcript = Transcript(SECRET)
        self._probe = Probe()
        hello = Hello(VERSION, "mallory", os.urandom(16), metadata.generation, nonce())
        self._transcript.add(self.send(encode(hello)))
        self._transcript.add(self.receive())
        self.send(encode(self._transcript.seal(b"dialer", self._probe.identity(transport))))
        self._open()
        self.send(encode(self._transcript.seal(b"dialer", Ready(int(transport), b""))))
        self._open()

    def send(self, body: bytes) -> bytes:
        self.sock.sendall(HEADER.pack(len(body)) + body)
        return body

    def receive(self) -> bytes:
        (length,) = HEADER.unpack(self.sock.recv(HEADER.size, socket.MSG_WAITALL))
        return self.sock.recv(length, socket.MSG_WAITALL)

    def _open(self) -> None:
        sealed = decode(self.receive())
        assert isinstance(sealed, messages.Sealed)
        self._transcript.open(b"acceptor", sealed)

    def close(self) -> None:
        self.sock.close()


def words(address: int) -> st.SearchStrategy[bytes]:
    near = st.integers(address - 64, address + SIZE + 64)
    number = st.one_of(near, st.integers(0, 2**64 - 1))
    return st.lists(number, max_size=4).map(lambda n: np.array(n, "<u8").tobytes())


def frames(address: int) -> st.SearchStrategy[bytes]:
    """Whole messages with wild fields, damaged ones, and plain noise."""
    ids, raw = st.integers(-1, 5), words(address)
    post = st.builds(
        messages.Post,
        ids,
        st.integers(-1, 2),
        st.lists(st.integers(-1, 3), max_size=3),
        raw,
        raw,
        st.one_of(st.integers(-1, 70_000), st.integers(0, 2**63)),
        st.integers(),
        st.one_of(st.none(), st.binary(max_size=8)),
        raw,
    ).filter(lambda m: abs(m.descriptors) < 2**63)
    others = st.one_of(
        st.builds(messages.Done, ids),
        st.builds(messages.Granted, ids),
        st.builds(messages.Stop, ids),
        st.builds(messages.Stopped, ids, ids),
        st.builds(messages.Drained, ids),
        st.builds(messages.Failed, ids, ids, st.text(max_size=5)),
        st.builds(messages.ReadEnded, ids, st.booleans(), st.none() | st.binary(max_size=5)),
        st.builds(messages.Notify, st.binary(max_size=5)),
        st.builds(messages.Bye),
    )
    whole = st.one_of(post, others).map(encode)
    damaged = st.tuples(whole, st.integers(0, 400), st.integers(0, 255)).map(_damage)
    return st.one_of(whole, damaged, st.binary(max_size=60))


def _damage(parts: tuple[bytes, int, int]) -> bytes:
    body, place, value = parts
    place %= len(body)
    return body[:place] + bytes([value]) + body[place + 1 :]


class Victim:
    """Registered memory between guards that nobody may touch."""

    GUARD = 4096

    def __init__(self, later: Callable[[Any], Any]) -> None:
        self.agent = later(nixl.agent("ucx", name="victim", secret=SECRET))
        self.whole = np.full(SIZE + 2 * self.GUARD, 0xAA, np.uint8)
        self.address = int(self.whole.ctypes.data) + self.GUARD
        self.agent.register_memory([(self.address, SIZE, 0, "")], "DRAM")
        self.friend = Node(later(nixl.agent("ucx", name="friend", secret=SECRET)), pages=1)
        self.friend.add(self.agent.get_agent_metadata())

    def untouched(self) -> bool:
        outside = np.concatenate([self.whole[: self.GUARD], self.whole[-self.GUARD :]])
        return bool((outside == 0xAA).all())

    def serves(self) -> bool:
        self.friend.agent.send_notif("victim", b"alive?")
        return bool(eventually(lambda: "friend" in self.agent.get_new_notifs()))


def fuzz(victim: Victim, transport: Transport, bodies: list[bytes]) -> None:
    mallory = Mallory(victim.agent, transport)
    try:
        for body in bodies:
            mallory.send(body)
        mallory.sock.shutdown(socket.SHUT_WR)
        while mallory.sock.recv(65536):
            pass
    except TimeoutError:
        raise
    except OSError:
        pass  # shown the door
    finally:
        mallory.close()
    eventually(lambda: victim.agent.peer_is_quiet("mallory"))
    assert victim.untouched()


def test_a_write_under_way_is_not_ended_as_a_read(later: Callable[[Any], Any]) -> None:
    """Its memory stays held until the copy is over, and the agent lives on."""
    victim = Victim(later)
    mallory = Mallory(victim.agent, Transport.CROSS_MEMORY)
    try:
        own = np.zeros(64, np.uint8)
        there = np.array([victim.address, victim.address + 64], "<u8").tobytes()
        # The second piece cannot be read, so the copy takes another turn of the loop, and fails.
        here = np.array([own.ctypes.data, 16], "<u8").tobytes()
        region = victim.agent._state.regions.snapshot()[0].id
        frames = (
            messages.Post(1, 1, [region], there, b"", 64, 2, None, here),
            messages.ReadEnded(1, True, None),
        )
        mallory.sock.sendall(
            b"".join(HEADER.pack(len(body)) + body for body in map(encode, frames))
        )
        while mallory.sock.recv(65536):
            pass
    except ConnectionError:
        pass  # shown the door
    finally:
        mallory.close()
    assert victim.serves()
    assert victim.agent._state.regions.busy() == 0


@pytest.mark.parametrize(
    "examples", [60, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_nonsense_from_a_peer_that_knows_the_secret(
    later: Callable[[Any], Any], examples: int
) -> None:
    victim = Victim(later)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(frames(victim.address), max_size=6))
    def check(bodies: list[bytes]) -> None:
        fuzz(victim, Transport.CROSS_MEMORY, bodies)

    check()
    assert victim.serves()
    assert victim.agent._state.regions.busy() == 0
