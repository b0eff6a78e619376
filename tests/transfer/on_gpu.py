"""Transfers with a GPU's memory at either end. Run by test_vram.py, in a process of its own.

On a machine with a GPU they use it; elsewhere UCX's own CUDA transports run on a driver that only
pretends to have one (stub/libcuda.c), in the folder that `PD_STUB_GPU` names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pd_transfer as nixl
from tests.transfer.node import DeviceNode, Node, RemoteNode, closing, eventually, load_stub

STUB = os.environ.get("PD_STUB_GPU", "")
if STUB:
    load_stub(STUB)

from pd_transfer.messages import Open, Post, encode  # noqa: E402
from pd_transfer.ucx import UcxOptions  # noqa: E402

SECRET = b"a secret of the cluster"
MIB = 1 << 20
SIZE = 4 * MIB
ON_DEVICE = [("VRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "VRAM")]


@pytest.fixture
def later() -> Iterator[Callable[[Any], Any]]:
    yield from closing()


class Pair:
    """An initiator "i" here and a target "t" in another process."""

    def __init__(
        self, later: Callable[[Any], Any], mine: str, theirs: str, options: dict[str, Any]
    ) -> None:
        self.later, self.options = later, options
        self.agent = later(
            nixl.agent("ucx", name="i", secret=SECRET, options=UcxOptions(**options))
        )
        self.i = (DeviceNode if mine == "VRAM" else Node)(self.agent, 4, MIB, seed=1)
        self.t = self.remote("t", theirs)
        self.kinds = (mine, theirs)
        self.agent.add_remote_agent(self.t.metadata())

    def remote(self, name: str, kind: str) -> Any:
        shape = {"pages": 4, "page": MIB, "seed": 2}
        return self.later(
            RemoteNode(
                name=name, secret=SECRET, options=self.options, kind=kind, stub=STUB, **shape
            )
        )

    def handle(self, operation: str, here: Any, there: Any, lengths: Any) -> nixl.nixl_xfer_handle:
        sides = []
        for name, node, kind, starts in (
            ("", self.i, self.kinds[0], here),
            ("t", self.t, self.kinds[1], there),
        ):
            rows = [np.asarray(starts) + node.address(), lengths, np.zeros_like(lengths)]
            table = np.stack(rows, 1).astype(np.uint64)
            sides.append(self.agent.prep_xfer_dlist(name, table, kind))
        order = np.arange(len(lengths))
        return self.agent.make_prepped_xfer(operation, sides[0], order, sides[1], order, b"there")

    def everything(self, operation: str = "WRITE") -> nixl.nixl_xfer_handle:
        return self.handle(operation, [0], [0], [SIZE])

    def many(self, operation: str) -> nixl.nixl_xfer_handle:
        """Everything, in twice as many messages as may be under way."""
        starts = np.arange(0, SIZE, SIZE // 16)
        return self.handle(operation, starts, starts[::-1], np.full(16, SIZE // 16))

    def finish(self, handle: nixl.nixl_xfer_handle) -> str:
        eventually(lambda: self.agent.check_xfer_state(handle) != "PROC")
        return self.agent.check_xfer_state(handle)

    def run(self, handle: nixl.nixl_xfer_handle) -> str:
        self.agent.transfer(handle)
        return self.finish(handle)


@pytest.fixture
def pair(later: Callable[[Any], Any]) -> Pair:
    return Pair(later, "VRAM", "VRAM", {})


@pytest.fixture(scope="module")
def lasting() -> Iterator[Pair]:
    """A pair for tests that leave it as they found it."""
    for later in closing():
        made = Pair(later, "VRAM", "VRAM", {})
        assert made.run(made.everything()) == "DONE"
        eventually(made.t.notifications)
        yield made


def pieces(longest: int, seed: int) -> tuple[Any, Any, Any]:
    """(N,) starts on either side and lengths: scattered, at odd addresses, in another order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, min(300, SIZE // longest))
    there = np.cumsum(lengths + rng.integers(0, 300, len(lengths))) - lengths
    inside = there + lengths <= SIZE
    lengths, there = lengths[inside], there[inside]
    order = rng.permutation(len(lengths))
    return np.cumsum(lengths) - lengths, there[order], lengths[order]


def move(pair: Pair, longest: int) -> None:
    """Both operations, checked byte by byte."""
    for operation in ("WRITE", "READ"):
        here, there, lengths = pieces(longest, seed=longest)
        here = np.cumsum(lengths) - lengths
        mine = np.frombuffer(pair.i.content(), np.uint8).copy()
        theirs = np.frombuffer(pair.t.content(), np.uint8).copy()
        for a, b, n in zip(here, there, lengths, strict=True):
            if operation == "WRITE":
                theirs[b : b + n] = mine[a : a + n]
            else:
                mine[a : a + n] = theirs[b : b + n]
        assert pair.run(pair.handle(operation, here, there, lengths)) == "DONE"
        assert eventually(pair.t.notifications) == {"i": [b"there"]}
        assert pair.t.digest() == hashlib.sha256(theirs).hexdigest()
        assert pair.i.content() == mine.tobytes()
        pair.i.fill(5)


@pytest.mark.parametrize(("mine", "theirs"), ON_DEVICE)
def test_short_and_long_pieces_both_ways(
    mine: str, theirs: str, later: Callable[[Any], Any]
) -> None:
    pair = Pair(later, mine, theirs, {})
    for longest in (400, 200_000, 3 * MIB // 2):
        move(pair, longest)
    counts = pair.agent.statistics()
    assert counts.transfers_done == 6
    assert counts.bytes_written == counts.bytes_read == pair.t.counters()["bytes_received"]
    if STUB and mine == theirs:
        # By CUDA IPC, and in either direction it is the receiving side that copies.
        for node in (pair.i, pair.t):
            driven = node.driven()
            assert driven["read_from_others"] > 0
            assert driven["written_to_others"] == 0


@pytest.mark.skipif(not STUB, reason="a real GPU is told by its address, not by UCX's transports")
def test_between_hosts_without_rdma(later: Callable[[Any], Any]) -> None:
    tcp = {"NET_DEVICES": "lo", "TLS": "tcp,self,cuda_copy"}
    pair = Pair(later, "VRAM", "VRAM", {"transport": "network", "settings": tcp})
    before = pair.i.driven()["read_from_others"]
    move(pair, 200_000)
    assert pair.i.driven()["read_from_others"] == before


def test_within_one_agent(later: Callable[[Any], Any]) -> None:
    made = later(nixl.agent("ucx", name="i", secret=SECRET))
    assert made.get_backend_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    gpu, host = DeviceNode(made, 4, 4096, seed=1), Node(made, 4, 4096, seed=2)
    expected = gpu.content()
    for source, target, operation in ((gpu, host, "WRITE"), (gpu, host, "READ")):
        target.fill(3)
        local, remote = (source, target) if operation == "WRITE" else (target, source)
        sides = [
            made.prep_xfer_dlist(name, [(node.address() + at, 4096, 0) for at in starts], node.kind)
            for name, node, starts in (
                ("", local, (0, 8192, 12288)),
                ("i", remote, (0, 8192, 12288)),
            )
        ]
        handle = made.make_prepped_xfer(operation, sides[0], [0, 1, 2], sides[1], [0, 1, 2])
        assert made.transfer(handle) == "DONE"
        assert target.content()[8192:] == expected[8192:]
        assert target.content()[4096:8192] != expected[4096:8192]


def test_hosts_memory_goes_its_own_way_on_the_same_link(lasting: Pair) -> None:
    pair = lasting
    host = Node(pair.agent, 4, 4096, seed=9)
    other = pair.remote("h", "DRAM")
    pair.agent.add_remote_agent(other.metadata())
    for kind, node in (("VRAM", pair.i), ("DRAM", host)):
        mine = pair.agent.prep_xfer_dlist("", [(node.address(), 4096, 0)], kind)
        theirs = pair.agent.prep_xfer_dlist("h", [(other.address(), 4096, 0)], "DRAM")
        assert pair.run(pair.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])) == "DONE"
        assert other.content()[:4096] == node.content()[:4096]
    [link] = [each for each in pair.agent._backend._links if each.peer == "h"]
    assert link._copier is not None
    assert link._device_wire is not None


def test_an_aborted_transfer_ends_when_nothing_can_land(lasting: Pair) -> None:
    pair = lasting
    for operation in ("WRITE", "READ"):
        handle = pair.many(operation)
        pair.t.stop()
        pair.agent.transfer(handle)
        pair.agent.abort(handle)
        assert pair.agent.check_xfer_state(handle) == "PROC"
        with pytest.raises(nixl.nixlNotAllowedError):
            pair.i.deregister()
        pair.t.resume()
        with pytest.raises(nixl.nixlCancelledError):
            pair.finish(handle)
    pair.i.fill(7)
    assert pair.run(pair.everything()) == "DONE"
    assert pair.t.digest() == pair.i.digest()
    for node in (pair.i, pair.t):  # nothing holds it any more
        node.deregister()
        node.register()
    pair.agent.add_remote_agent(pair.t.metadata())


def test_an_abort_before_the_way_is_open(pair: Pair) -> None:
    pair.agent.send_notif("t", b"connected?")
    eventually(pair.t.notifications)
    pair.t.stop()
    handle = pair.everything()
    pair.agent.transfer(handle)
    pair.agent.abort(handle)
    with pytest.raises(nixl.nixlCancelledError):
        pair.finish(handle)
    pair.t.resume()
    assert pair.run(pair.everything()) == "DONE"


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_peer_killed_amid_a_transfer(pair: Pair, operation: str) -> None:
    assert pair.run(pair.everything()) == "DONE"
    handle = pair.everything(operation)
    pair.t.stop()
    pair.agent.transfer(handle)
    assert pair.agent.check_xfer_state(handle) == "PROC"
    pair.t.kill()
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        pair.finish(handle)
    assert pair.agent.peer_state("t") == "dead"
    assert pair.agent.peer_is_quiet("t")
    before = pair.i.content()
    pair.i.deregister()
    assert pair.i.content() == before


def test_a_target_gives_up_what_a_killed_initiator_left(pair: Pair) -> None:
    other = pair.remote("o", "VRAM")
    other.add(pair.i.metadata())
    other.send("i", b"connected")
    eventually(pair.i.notifications)
    other.write_everything("i", pair.i.address(), SIZE)
    other.kill()
    eventually(lambda: pair.agent.peer_state("o") == "dead")
    assert pair.agent.peer_is_quiet("o")
    pair.i.deregister()


def test_memory_that_was_deregistered_since_is_refused(lasting: Pair) -> None:
    pair = lasting
    for operation in ("WRITE", "READ"):
        handle = pair.everything(operation)
        pair.t.deregister()
        pair.i.fill(4)
        before = pair.t.digest(), pair.i.digest()
        with pytest.raises(nixl.nixlNotFoundError):
            pair.run(handle)
        assert (pair.t.digest(), pair.i.digest()) == before
        pair.t.register()
        with pytest.raises(nixl.nixlNotFoundError):  # not even at the same address
            pair.run(handle)
        pair.agent.add_remote_agent(pair.t.metadata())
        assert pair.run(pair.everything(operation)) == "DONE"
        assert pair.t.digest() == pair.i.digest()


def test_what_names_a_gpus_memory_on_another_way_is_refused(lasting: Pair) -> None:
    """A copy of a GPU's address as if it were the host's would end the process."""
    pair = lasting
    before = pair.t.digest()
    [link] = [each for each in pair.agent._backend._links if each.peer == "t"]
    [region] = pair.agent._state.peers["t"].metadata.regions
    place = np.array([pair.t.address()], "<u8").tobytes()
    source = np.array([pair.i.memory.ctypes.data], "<u8").tobytes()
    link.connection.send(Post(999, 1, [region.id], place, b"", 4096, 1, None, source))
    # The answer to what this side knows nothing of ends the link, at this end.
    eventually(lambda: pair.agent.peer_is_quiet("t"))
    assert pair.t.digest() == before
    pair.agent.add_remote_agent(pair.t.metadata())
    assert pair.run(pair.everything()) == "DONE"


def test_an_address_without_the_secrets_proof_is_refused(lasting: Pair) -> None:
    """UCX would believe all that is in it."""
    pair = lasting
    [link] = [each for each in pair.agent._backend._links if each.peer == "t"]
    for junk in (Open(b"\xff" * 64, b"\0" * 32), Open(b"", b"")):
        assert encode(junk)
        link.connection.send(junk)
    eventually(lambda: pair.agent.peer_is_quiet("t"))
    pair.agent.add_remote_agent(pair.t.metadata())
    assert pair.run(pair.everything()) == "DONE"


def test_only_a_gpus_memory_is_registered_as_such(later: Callable[[Any], Any]) -> None:
    made = later(nixl.agent("ucx", name="i", secret=SECRET))
    node = DeviceNode(made, 4, 4096)
    address = node.address()
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(nixl.nixlInvalidParamError, match="not memory of GPU 0"):
        made.register_memory([(memory.ctypes.data, 4096, 0, "")], "VRAM")
    with pytest.raises(nixl.nixlInvalidParamError, match="not memory of GPU 0"):
        made.register_memory([(address, 1 << 40, 0, "")], "VRAM")
    with pytest.raises(nixl.nixlNotFoundError, match="no GPU 99"):
        made.register_memory([(address, 4096, 99, "")], "VRAM")
    settings = {"TLS": "posix,sysv,self"}
    deaf = later(nixl.agent("ucx", name="d", secret=SECRET, options=UcxOptions(settings=settings)))
    with pytest.raises(nixl.nixlBackendError, match="no CUDA transports"):
        deaf.register_memory([(address, 4096, 0, "")], "VRAM")
