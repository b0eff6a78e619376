"""What only real processes, sockets and transports can show."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pd_transfer as nixl
from pd_transfer import bench
from pd_transfer import metadata as wire_metadata
from pd_transfer.handshake import Transcript, nonce
from pd_transfer.messages import HEADER, VERSION, Challenge, Hello, Notify, Post, decode, encode
from pd_transfer.ucx import UcxOptions
from tests.transfer.conftest import SECRET, World
from tests.transfer.node import PAGE, Node, RemoteNode, eventually, rows

MIB = 1 << 20
TCP_ALONE = {"NET_DEVICES": "lo", "TLS": "tcp,self"}


def test_every_transport_and_kind_of_message(later: Callable[[Any], Any], transport: str) -> None:
    """Long runs, short runs, and both mixed, at odd addresses, checked byte by byte."""
    options: dict[str, Any] = {"transport": transport}
    if transport in ("ucx", "tcp"):
        options = {"transport": "network", "network": transport, "settings": TCP_ALONE}
    target = later(RemoteNode(name="t", secret=SECRET, options=options, pages=24, page=MIB, seed=2))
    made = later(nixl.agent("ucx", name="i", secret=SECRET, options=UcxOptions(**options)))
    node = Node(made, pages=24, page=MIB, seed=1)
    node.add(target.metadata())
    theirs = np.random.default_rng(2).integers(0, 256, 24 * MIB, np.uint8)
    assert target.digest() == hashlib.sha256(theirs).hexdigest()
    rng = np.random.default_rng(7)
    for longest in (400, 200_000, 9 * MIB):
        lengths = rng.integers(1, longest, min(3000, 20 * MIB // longest))
        starts = np.cumsum(lengths + rng.integers(0, 300, len(lengths))) - lengths
        inside = starts + lengths <= 24 * MIB
        shift = rng.permutation(int(inside.sum()))
        lengths, here = lengths[inside][shift], starts[inside][shift]
        there = np.cumsum(lengths + 1) - lengths
        zero = np.zeros_like(lengths)
        local = np.stack([node.address() + here, lengths, zero], 1).astype(np.uint64)
        remote = np.stack([target.address() + there, lengths, zero], 1).astype(np.uint64)
        order = np.arange(len(lengths))
        for operation in ("WRITE", "READ"):
            handle = made.make_prepped_xfer(
                operation,
                made.prep_xfer_dlist("", local, "DRAM"),
                order,
                made.prep_xfer_dlist("t", remote, "DRAM"),
                order,
            )
            mine = node.memory.copy()
            for a, b, n in zip(here, there, lengths, strict=True):
                if operation == "WRITE":
                    theirs[b : b + n] = mine[a : a + n]
                else:
                    mine[a : a + n] = theirs[b : b + n]
            if operation == "READ":
                for a, n in zip(here, lengths, strict=True):
                    node.memory[a : a + n] = 0
            made.transfer(handle)
            eventually(lambda handle=handle: made.check_xfer_state(handle) == "DONE")
            assert target.digest() == hashlib.sha256(theirs).hexdigest()
            assert np.array_equal(node.memory, mine)


@pytest.fixture(params=["auto", "shared-memory", "ucx", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


class Big:
    """An initiator here and a target process, with memory that no window of messages covers."""

    SIZE = 48 * MIB

    def __init__(self, later: Callable[[Any], Any]) -> None:
        self.target = later(
            RemoteNode(name="t", secret=SECRET, options={}, pages=48, page=MIB, seed=2)
        )
        self.agent = later(nixl.agent("ucx", name="i", secret=SECRET))
        self.node = Node(self.agent, pages=48, page=MIB, seed=1)
        self.node.add(self.target.metadata())
        self.agent.send_notif("t", b"connected?")
        eventually(self.target.notifications)

    def handle(self, operation: str, message: bytes = b"whole") -> nixl.nixl_xfer_handle:
        everything = np.array([[self.target.address(), self.SIZE, 0]], np.uint64)
        return self.agent.make_prepped_xfer(
            operation,
            self.agent.prep_xfer_dlist("", rows(self.node.memory, self.SIZE), "DRAM"),
            [0],
            self.agent.prep_xfer_dlist("t", everything, "DRAM"),
            [0],
            message,
        )

    def told(self) -> None:
        """Return once the agent's thread has sent what it was asked to, e.g. an abort."""
        done = threading.Event()
        self.agent._backend.loop.call(done.set)  # type: ignore[attr-defined]
        assert done.wait(30)


@pytest.fixture
def big(later: Callable[[Any], Any]) -> Iterator[Big]:
    made = Big(later)
    try:
        yield made
    finally:
        made.target.resume()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_stopped_peer_is_not_dead(big: Big, operation: str) -> None:
    handle = big.handle(operation)
    big.target.stop()
    big.agent.transfer(handle)
    big.agent.send_notif("t", b"still there?")
    assert big.agent.peer_state("t") == "alive"
    assert not big.agent.peer_is_quiet("t")
    assert big.agent.check_xfer_state(handle) == "PROC"
    with pytest.raises(nixl.nixlRepostActiveError):
        big.agent.transfer(handle)
    # What the target may still read or write cannot be taken away.
    with pytest.raises(nixl.nixlNotAllowedError):
        big.node.deregister()
    big.target.resume()
    eventually(lambda: big.agent.check_xfer_state(handle) == "DONE")
    assert big.target.digest() == big.node.digest()
    big.node.deregister()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_an_aborted_transfer_ends_only_when_the_target_says_so(big: Big, operation: str) -> None:
    handle = big.handle(operation)
    big.target.stop()
    big.agent.transfer(handle)
    big.agent.abort(handle)
    big.agent.abort(handle)
    big.told()
    assert big.agent.check_xfer_state(handle) == "PROC"
    big.target.resume()
    with pytest.raises(nixl.nixlCancelledError):
        eventually(lambda: big.agent.check_xfer_state(handle) != "PROC")
    # From here on nothing of it lands: what the source holds now never shows at the target.
    before = big.target.digest() if operation == "WRITE" else big.node.digest()
    if operation == "WRITE":
        big.node.memory[:] = 0
    big.agent.send_notif("t", b"later")
    seen = eventually(big.target.notifications)
    assert seen == {"i": [b"later"]}, "an aborted transfer must not notify"
    after = big.target.digest() if operation == "WRITE" else big.node.digest()
    assert after == before
    assert big.agent.statistics().transfers_aborted == 1
    big.node.deregister()
    big.target.deregister()
    big.node.register()
    big.target.register()
    big.agent.add_remote_agent(big.target.metadata())
    # The link is as good as new.
    handle = big.handle(operation)
    big.agent.transfer(handle)
    eventually(lambda: big.agent.check_xfer_state(handle) == "DONE")


def test_releasing_an_active_handle_aborts_it(big: Big) -> None:
    handle = big.handle("WRITE")
    big.target.stop()
    big.agent.transfer(handle)
    big.agent.release_xfer_handle(handle)
    big.told()
    big.target.resume()
    eventually(lambda: big.agent.statistics().transfers_active == 0)
    assert big.agent.statistics().transfers_aborted == 1
    big.node.deregister()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_peer_killed_amid_a_transfer(big: Big, operation: str) -> None:
    handle = big.handle(operation)
    queued = big.handle("WRITE")
    big.target.stop()
    big.agent.transfer(handle)
    big.agent.transfer(queued)
    big.target.kill()
    for each in (handle, queued):
        with pytest.raises(nixl.nixlRemoteDisconnectError):
            eventually(lambda each=each: big.agent.check_xfer_state(each) != "PROC")
    assert big.agent.peer_state("t") == "dead"
    assert big.agent.peer_is_quiet("t")
    big.node.deregister()


def test_a_target_gives_up_what_a_killed_initiator_left(later: Callable[[Any], Any]) -> None:
    """Here the target is this process and the initiator another, killed with data under way."""
    initiator = later(RemoteNode(name="i", secret=SECRET, options={}, pages=48, page=MIB, seed=1))
    agent = later(nixl.agent("ucx", name="t", secret=SECRET))
    target = Node(agent, pages=48, page=MIB, seed=2)
    initiator.add(target.metadata())
    initiator.write_everything("t", target.address(), 48 * MIB)
    eventually(lambda: agent.statistics().bytes_received or not _untouched(target))
    initiator.kill()
    eventually(lambda: agent.peer_is_quiet("i"))
    assert agent.peer_state("i") == "dead"
    # Its regions are held no more, and stay as they are.
    target.deregister()
    before = target.digest()
    other = later(Node(later(nixl.agent("ucx", name="o", secret=SECRET)), seed=3))
    other.add(target.metadata())
    other.send("t", b"alive")
    assert eventually(target.notifications)["o"] == [b"alive"]
    assert target.digest() == before


def _untouched(target: Node) -> bool:
    fresh = np.random.default_rng(2).integers(0, 256, MIB, np.uint8)
    return bool(np.array_equal(target.memory[:MIB], fresh))


def test_a_killed_peer_whose_child_holds_its_sockets(later: Callable[[Any], Any]) -> None:
    world = World("processes", later)
    world.meet()
    assert world.run(world.handle()) == "DONE"
    child = world.t.fork_a_child()
    try:
        world.t.kill()
        eventually(lambda: world.i.state("t") == "dead")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_peer_that_is_not_there(later: Callable[[Any], Any]) -> None:
    world = World("processes", later)
    data = world.t.metadata()
    world.t.kill()
    world.i.add(data)
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        world.run(world.handle())
    assert world.i.state("t") == "dead"


def _address(node: Node) -> tuple[str, int]:
    host, port, _ = msgspec.msgpack.decode(wire_metadata.decode(node.metadata()).connection)
    return host, port


def _closed_by_peer(sock: socket.socket) -> bool:
    sock.settimeout(30)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_garbage_closes_that_connection_only(later: Callable[[Any], Any]) -> None:
    world = World("ucx", later)
    world.meet()
    assert world.run(world.handle()) == "DONE"
    generation = world.t.agent._state.generation
    hello = encode(Hello(VERSION, "mallory", b"m" * 16, generation, nonce()))
    wrong = Transcript(b"a guess")
    before = world.t.content()
    for frames in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("<I", 2**31) + b"x" * 64,
        _frame(b""),
        _frame(b"\xc1"),
        _frame(b"\x80\x04\x95\x05."),  # a pickle
        _frame(secrets.token_bytes(500)),
        _frame(encode(Notify(b"let me in"))),
        _frame(encode(Post(1, 1, [1], b"", b"", 0, 0, b"let me in"))),
        _frame(encode(Hello(VERSION, "", b"m" * 16, generation, nonce()))),
        _frame(encode(Hello(99, "mallory", b"m" * 16, generation, nonce()))),
        _frame(encode(Hello(VERSION, "mallory", b"m" * 16, b"w" * 16, nonce()))),
        _frame(hello) + _frame(encode(Notify(b"let me in"))),
        _frame(hello) + _frame(encode(wrong.seal(b"dialer", Notify(b"let me in")))),
    ):
        with socket.create_connection(_address(world.t)) as sock:
            sock.sendall(frames)
            assert _closed_by_peer(sock)
    assert world.t.notifications() == {}
    assert world.t.content() == before
    with pytest.raises(nixl.nixlNotFoundError):
        world.t.state("mallory")
    assert world.run(world.handle("WRITE", [1], [1])) == "DONE"


def _frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def test_a_reflected_proof_is_no_proof(later: Callable[[Any], Any]) -> None:
    """Without the secret, a dialer can only send back what the acceptor itself has sealed."""
    world = World("ucx", later)
    generation = world.t.agent._state.generation
    with socket.create_connection(_address(world.t)) as sock:
        sock.settimeout(30)
        sock.sendall(_frame(encode(Hello(VERSION, "mallory", b"m" * 16, generation, nonce()))))
        (length,) = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        body = sock.recv(length, socket.MSG_WAITALL)
        assert isinstance(decode(body), Challenge)
        sock.sendall(_frame(body))
        assert _closed_by_peer(sock)


def test_each_side_demands_the_proof() -> None:
    one, other, foreign = Transcript(b"s"), Transcript(b"s"), Transcript(b"x")
    sealed = one.seal(b"dialer", Notify(b"1"))
    assert other.open(b"dialer", sealed) == Notify(b"1")
    with pytest.raises(nixl.nixlNotAllowedError):
        foreign.open(b"dialer", sealed)
    with pytest.raises(nixl.nixlNotAllowedError):
        Transcript(b"s").open(b"acceptor", sealed)
    # Said twice, it no longer fits what has been said.
    with pytest.raises(nixl.nixlNotAllowedError):
        other.open(b"dialer", sealed)


def test_without_a_secret_the_metadata_is_the_key(later: Callable[[Any], Any]) -> None:
    a, b = (later(nixl.nixl_agent(name)) for name in "ab")
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"hello")
    assert eventually(b.get_new_notifs) == {"a": [b"hello"]}
    guarded = later(nixl.nixl_agent("g", secret=SECRET))
    with pytest.raises(nixl.nixlMismatchError):
        a.add_remote_agent(guarded.get_agent_metadata())
    with pytest.raises(ValueError, match="secret"):
        nixl.nixl_agent("e", secret=b"")


def test_an_idle_agent_sleeps(later: Callable[[Any], Any]) -> None:
    """No spinning, with open links: an idle agent's thread is not scheduled at all."""
    world = World("ucx", later)
    world.meet()
    world.t.add(world.i.metadata())
    assert world.run(world.handle(message=b"x")) == "DONE"
    world.t.send("i", b"x")
    eventually(world.i.notifications)

    agents = [node.agent._backend.loop._thread.native_id for node in (world.i, world.t)]

    def switches() -> list[str]:
        status = [Path(f"/proc/self/task/{id}/status").read_text() for id in agents]
        return [line for text in status for line in text.splitlines() if "ctxt_switches" in line]

    pause = threading.Event()

    def quiet() -> bool:
        before = switches()
        pause.wait(0.3)
        return switches() == before

    assert eventually(quiet)


def test_many_threads_and_peers_at_once(later: Callable[[Any], Any]) -> None:
    """Transfers of all sizes interleave on two links and arrive whole, each told once."""
    secret = SECRET
    made = later(nixl.agent("ucx", name="i", secret=secret))
    node = Node(made, pages=256, page=PAGE, seed=1)
    targets = {
        name: later(
            RemoteNode(name=name, secret=secret, options={}, pages=256, page=PAGE, seed=seed)
        )
        for seed, name in enumerate("xy", 2)
    }
    for target in targets.values():
        node.add(target.metadata())
    mine = made.prep_xfer_dlist("", rows(node.memory, PAGE), "DRAM")
    errors: list[BaseException] = []

    def work(name: str, lane: int) -> None:
        # Each thread owns pages [64 * lane, 64 * lane + 64) of its target.
        rng = np.random.default_rng(lane)
        table = rows(node.memory, PAGE)
        table[:, 0] = targets[name].address() + np.arange(256) * PAGE
        theirs = made.prep_xfer_dlist(name, table, "DRAM")
        try:
            for n in range(25):
                count = int(rng.integers(1, 65))
                chosen = 64 * lane + rng.permutation(64)[:count]
                handle = made.make_prepped_xfer(
                    "WRITE", mine, chosen, theirs, chosen, b"%d %d" % (lane, n)
                )
                made.transfer(handle)
                if n % 5 == 4:
                    made.abort(handle)
                try:
                    eventually(lambda h=handle: made.check_xfer_state(h) == "DONE")
                except nixl.nixlCancelledError:
                    handle = made.make_prepped_xfer(
                        "WRITE", mine, chosen, theirs, chosen, b"%d %d" % (lane, n)
                    )
                    made.transfer(handle)
                    eventually(lambda h=handle: made.check_xfer_state(h) == "DONE")
                handle.release()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(name, lane)) for name in targets for lane in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for target in targets.values():
        got = sorted(target.notifications()["i"])
        assert got == sorted(b"%d %d" % (lane, n) for lane in range(4) for n in range(25))
    assert made.statistics().transfers_active == 0
    assert made.statistics().handles_open == 0


def test_closing_with_transfers_under_way(later: Callable[[Any], Any]) -> None:
    world = World("ucx", later)
    world.meet()
    handles = [world.handle() for _ in range(50)]
    for handle in handles:
        world.i.agent.transfer(handle)
    world.i.agent.close()
    for handle in handles:
        try:
            assert world.i.agent.check_xfer_state(handle) == "DONE"
        except nixl.nixlRemoteDisconnectError:
            pass
    assert world.i.agent.statistics().transfers_active == 0
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        world.run(handles[0])
    world.i.agent.close()


def test_the_readme_runs(tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "transfer" / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("b'page 3 is there'")


def test_the_bench_measures_everything() -> None:
    figures = bench.run([4096, 262_144], total=4 * MIB, repeats=1, round_trips=10)
    trips = {"roundtrip_us", "roundtrip_p99_us", "socket_roundtrip_us", "post_10000_us"}
    expected = trips | {
        f"{operation}.{layout}.{size}.{figure}"
        for operation in ("write", "read")
        for layout in ("contiguous", "scattered")
        for size in (4096, 262_144)
        for figure in ("ours_gbps", "memcpy_gbps", "ours_cpu_s_per_gb")
    }
    expected |= {f"write.{layout}.262144.busy_ratio" for layout in ("contiguous", "scattered")}
    # Where the wheel is installed its figures stand beside.
    without = {name for name in figures if "nixl" not in name and "noise" not in name}
    assert without == expected
    assert all(value > 0 for value in figures.values())
    json.dumps(figures)
