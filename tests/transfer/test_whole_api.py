"""The parts of NIXL's API that the cluster does not use, frozen against the wheel 1.5.1."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pd_transfer as nixl
from pd_transfer import listener
from tests.transfer.conftest import SECRET, World
from tests.transfer.node import PAGE, Node, eventually, rows

DRAM = nixl.DRAM_SEG


@pytest.fixture(params=["fake", "ucx"])
def world(request: pytest.FixtureRequest, later: Callable[[Any], Any]) -> World:
    return World(request.param, later)


def test_initialize_xfer(world: World) -> None:
    world.meet()
    agent = world.i.agent
    mine = agent.get_xfer_descs(rows(world.i.memory, PAGE)[:3], "DRAM")
    theirs = agent.get_xfer_descs(world.target_rows()[[5, 9, 2]], "DRAM")
    handle = agent.initialize_xfer("WRITE", mine, theirs, "t", b"all three")
    assert world.run(handle) == "DONE"
    assert eventually(world.t.notifications) == {"i": [b"all three"]}
    there = np.frombuffer(world.t.content(), np.uint8).reshape(-1, PAGE)
    here = np.frombuffer(world.i.content(), np.uint8).reshape(-1, PAGE)
    assert np.array_equal(there[[5, 9, 2]], here[:3])
    assert agent.query_xfer_backend(handle) == "UCX"
    short = agent.get_xfer_descs(world.target_rows()[:2], "DRAM")
    empty = nixl.nixlXferDList(DRAM)
    for local, remote in ((mine, short), (empty, empty)):
        with pytest.raises(nixl.nixlInvalidParamError):
            agent.initialize_xfer("WRITE", local, remote, "t")
    for remote, name in ((theirs, "nobody"), (nixl.nixlXferDList(DRAM, [(1, PAGE, 0)] * 3), "t")):
        with pytest.raises(nixl.nixlNotFoundError):
            agent.initialize_xfer("READ", mine, remote, name)


def test_strided_lists_are_many_descriptors(world: World) -> None:
    world.meet()
    agent = world.i.agent
    odd = np.array([[world.i.address() + PAGE, PAGE, 0, 2 * PAGE, 4]], np.uint64)
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", odd, "DRAM")
    theirs = agent.prep_xfer_dlist("t", world.target_rows(), "DRAM")
    handle = agent.make_prepped_xfer("WRITE", mine, [0, 3], theirs, [0, 1])
    assert world.run(handle) == "DONE"
    here = np.frombuffer(world.i.content(), np.uint8).reshape(-1, PAGE)
    there = np.frombuffer(world.t.content(), np.uint8).reshape(-1, PAGE)
    assert np.array_equal(there[:2], here[[1, 7]])
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.make_prepped_xfer("WRITE", mine, [4], theirs, [0])
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.prep_xfer_dlist("", odd)
    with pytest.raises(ValueError, match="uint64"):
        agent.prep_xfer_dlist("", odd.astype(float), "DRAM")


def test_lists_travel_as_numbers_only(world: World) -> None:
    agent = world.i.agent
    xfer = agent.get_xfer_descs([(1, 2, 0), (3, 4, 1)], "DRAM")
    reg = agent.get_reg_descs([(1, 2, 0, "m"), (3, 4, 1, b"\xff")], "DRAM")
    for descs in (xfer, reg, nixl.nixlXferDList(DRAM), nixl.nixlRegDList(DRAM)):
        data = agent.get_serialized_descs(descs)
        assert agent.deserialize_descs(data) == descs
        assert pickle.loads(pickle.dumps(descs)) == descs
        for damaged in (data[:-1], data + b"\0", b"", pickle.dumps(descs)):
            with pytest.raises(nixl.nixlMismatchError):
                agent.deserialize_descs(damaged)


def test_remote_lists(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    agent = world.i.agent
    remote = agent.get_remote_descs([(1, 2, 0, "t")], "DRAM")
    assert agent.get_remote_descs(remote) is remote
    remote.addDesc((3, 4, 0, b"u"))
    assert [remote[0], remote[1]] == [(1, 2, 0, "t"), (3, 4, 0, "u")]
    assert remote != nixl.nixlRemoteDList(DRAM, [(1, 2, 0, "t"), (3, 4, 0, "t")])
    remote.remDesc(0)
    assert remote == nixl.nixlRemoteDList(DRAM, [(3, 4, 0, "u")])
    remote[0] = (5, 6, 0, "v")
    remote.print()
    assert "5 6 0 v" in capsys.readouterr().out
    with pytest.raises(TypeError):
        pickle.dumps(remote)
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.get_remote_descs([(1, 2, 0)], "DRAM")


class OnDevice:
    """What a GPU library's array tells of itself."""

    device = 1

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "<f2",
            "data": (4096, False),
            "version": 3,
        }


def test_gpu_arrays_are_vram(world: World) -> None:
    agent = world.i.agent
    for strides in (None, (6, 2)):
        descs = agent.get_xfer_descs(OnDevice((4, 3), strides))
        assert descs == nixl.nixlXferDList(nixl.VRAM_SEG, [(4096, 24, 1)])
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.get_xfer_descs([OnDevice((4, 3), (2, 8))])


def test_partial_metadata_adds_up(world: World) -> None:
    extra = np.zeros(4096, np.uint8)
    more = world.t.agent.register_memory([(extra.ctypes.data, 4096, 0, "")], "DRAM")
    only = world.t.agent.get_partial_agent_metadata(more)
    place = world.t.agent.get_partial_agent_metadata(nixl.nixlRegDList(DRAM))
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.add_remote_agent(only)
    assert world.i.agent.add_remote_agent(place) == b"t"
    assert world.i.agent.check_remote_metadata("t")
    assert not world.i.agent.check_remote_metadata("t", more.trim())
    world.i.agent.add_remote_agent(only)
    assert world.i.agent.check_remote_metadata("t", more.trim())
    pool = nixl.nixlXferDList(DRAM, world.target_rows())
    assert not world.i.agent.check_remote_metadata("t", pool)
    both = world.t.agent.get_partial_agent_metadata(world.t.registered, inc_conn_info=True)
    world.i.agent.add_remote_agent(both)
    assert world.i.agent.check_remote_metadata("t", pool)
    assert world.i.agent.check_remote_metadata("t", more.trim())
    assert world.run(world.handle()) == "DONE"
    with pytest.raises(nixl.nixlNotFoundError):
        world.t.agent.get_partial_agent_metadata(nixl.nixlRegDList(DRAM, [(1, 1, 0, "")]))
    world.t.agent.deregister_memory(more)


def test_make_connection_and_backends(world: World) -> None:
    agent = world.i.agent
    with pytest.raises(nixl.nixlNotFoundError):
        agent.make_connection("t")
    world.meet()
    agent.make_connection("t", ["UCX"])
    assert agent.get_plugin_list() == ["UCX"]
    assert agent.get_plugin_mem_types("UCX") == agent.get_backend_mem_types("UCX")
    assert agent.get_backend_mem_types("UCX")[0] == "DRAM_SEG"
    assert agent.get_plugin_mem_types("GDS") == agent.get_backend_mem_types("GDS") == []
    assert agent.get_plugin_params("UCX") == agent.get_backend_params("UCX") == {}
    with pytest.raises(nixl.nixlNotFoundError):
        agent.create_backend("GDS")
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.create_backend("UCX")
    with pytest.raises(ValueError, match="GDS"):
        agent.query_memory(world.i.registered, "GDS")
    with pytest.raises(nixl.nixlNotSupportedError):
        agent.query_memory(world.i.registered, "UCX")


def test_an_agent_without_its_backend_has_none() -> None:
    config = nixl.nixl_agent_config(backends=["GDS"])
    with nixl.agent("fake", name="a", config=config, network=nixl.FakeNetwork()) as agent:
        memory = np.zeros(8, np.uint8)
        with pytest.raises(nixl.nixlNotFoundError):
            agent.register_memory([(memory.ctypes.data, 8, 0, "")], "DRAM")
        agent.create_backend("UCX")
        agent.register_memory([(memory.ctypes.data, 8, 0, "")], "DRAM")


def test_looking_for_one_notification(world: World) -> None:
    world.meet()
    agent = world.t.agent
    for message in (b"done-1", b"done-2", b"", b"other"):
        world.i.agent.send_notif("t", message)
    eventually(lambda: agent.statistics().notifications_received == 4)
    assert not agent.check_remote_xfer_done("nobody", b"done")
    assert agent.check_remote_xfer_done("i", b"done-2")
    assert agent.notifs == {"i": [b"done-1", b"", b"other"]}
    assert not agent.check_remote_xfer_done("i", b"the")
    assert agent.check_remote_xfer_done("i", b"the", tag_is_prefix=False)
    # Each is found once, the empty one too.
    assert [agent.check_remote_xfer_done("i", b"") for _ in range(3)] == [True, True, False]
    agent.send_notif("t", b"self")
    assert agent.update_notifs() == {"i": [], "t": [b"self"]}
    assert agent.get_new_notifs() == {}


@pytest.mark.parametrize("variable", ["", "y", "n"])
def test_telemetry(
    monkeypatch: pytest.MonkeyPatch, later: Callable[[Any], Any], variable: str
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", variable)
    world = World("fake", later)
    config = nixl.nixl_agent_config(capture_telemetry=variable != "y")
    made = nixl.agent("fake", name="m", config=config, secret=SECRET, network=world.network)
    agent = later(made)
    node = Node(agent, seed=3)
    world.network.hold = True
    mine = agent.prep_xfer_dlist("", rows(node.memory, PAGE), "DRAM")
    agent.add_remote_agent(world.t.metadata())
    theirs = agent.prep_xfer_dlist("t", world.target_rows(), "DRAM")
    handle = agent.make_prepped_xfer("WRITE", mine, [0, 1, 5], theirs, [0, 1, 2])
    if variable == "n":
        with pytest.raises(nixl.nixlNoTelemetryError):
            agent.get_xfer_telemetry(handle)
        return
    with pytest.raises(nixl.nixlNotPostedError):
        agent.get_xfer_telemetry(handle)
    assert agent.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    agent.transfer(handle)
    assert agent.get_xfer_telemetry(handle).xferDuration == 0
    world.network.deliver()
    told = agent.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (3 * PAGE, 2)
    assert told.xferDuration > told.postDuration > 0
    assert told.startTime > 0
    duration, margin, method = agent.estimate_xfer_cost(handle)
    assert duration > 0
    assert margin > 0
    assert method == "ANALYTICAL_BACKEND"


def listening(later: Callable[[Any], Any], name: str, secret: bytes = SECRET) -> nixl.nixl_agent:
    config = nixl.nixl_agent_config(enable_listen_thread=True, listen_port=0)
    return later(nixl.agent("ucx", name=name, config=config, secret=secret))


def test_metadata_by_tcp(later: Callable[[Any], Any]) -> None:
    a, b = (Node(listening(later, name), seed=n) for n, name in enumerate("ab"))
    a.agent.send_local_metadata("127.0.0.1", b.agent.listen_port)
    eventually(lambda: b.agent.check_remote_metadata("a", a.registered.trim()))
    a.agent.fetch_remote_metadata("b", "127.0.0.1", b.agent.listen_port)
    eventually(lambda: a.agent.check_remote_metadata("b", b.registered.trim()))
    a.agent.send_notif("b", b"found you")
    assert eventually(b.notifications) == {"a": [b"found you"]}
    extra = np.zeros(64, np.uint8)
    more = a.agent.register_memory([(extra.ctypes.data, 64, 0, "")], "DRAM")
    a.agent.send_partial_agent_metadata(
        more, ip_addr="127.0.0.1", port=b.agent.listen_port, label="x"
    )
    eventually(lambda: b.agent.check_remote_metadata("a", more.trim()))
    a.agent.invalidate_local_metadata("127.0.0.1", b.agent.listen_port)
    eventually(lambda: not b.agent.check_remote_metadata("a"))
    for call in (
        a.agent.send_local_metadata,
        a.agent.invalidate_local_metadata,
        lambda: a.agent.fetch_remote_metadata("b"),
    ):
        with pytest.raises(nixl.nixlInvalidParamError):
            call()


def test_strangers_at_the_listener(later: Callable[[Any], Any]) -> None:
    b = listening(later, "b")
    where = ("127.0.0.1", b.listen_port)
    stranger = later(nixl.agent("ucx", name="s", secret=b"a guess"))
    for request in (
        listener.Send(stranger.get_agent_metadata()),
        listener.Fetch("b"),
        listener.Invalidate("s", b"x" * 16),
    ):
        with pytest.raises(OSError, match="ended early|reset"):
            listener.ask(where, b"a guess", request)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 36):
        with socket.create_connection(where, timeout=30) as sock:
            sock.sendall(garbage)
            with contextlib.suppress(OSError):  # it may have hung up already
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    assert not b.check_remote_metadata("s")
    # Whom nobody knows cannot be fetched, and an earlier agent's farewell is no later one's.
    assert listener.ask(where, SECRET, listener.Fetch("nobody")) == b""
    friend = later(nixl.agent("ucx", name="f", secret=SECRET))
    listener.ask(where, SECRET, listener.Send(friend.get_agent_metadata()))
    listener.ask(where, SECRET, listener.Invalidate("f", b"x" * 16))
    assert b.check_remote_metadata("f")
    with pytest.raises(nixl.nixlNotFoundError):
        friend.listen_port  # noqa: B018
