"""Faults on demand, which only the fake backend has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pd_transfer as nixl
from tests.transfer.conftest import World
from tests.transfer.node import PAGE


@pytest.fixture
def held(later: Callable[[Any], Any]) -> World:
    world = World("fake", later)
    world.meet()
    world.network.hold = True
    return world


def page(node: Any, index: int) -> bytes:
    return bytes(node.content()[index * PAGE : (index + 1) * PAGE])


def test_what_is_held_happens_by_hand_in_any_order(held: World) -> None:
    agent, network = held.i.agent, held.network
    first, second = held.handle("WRITE", [0], [0], b"1"), held.handle("WRITE", [1], [1], b"2")
    agent.transfer(first)
    agent.transfer(second)
    agent.send_notif("t", b"3")
    before = held.t.content()
    assert agent.check_xfer_state(first) == agent.check_xfer_state(second) == "PROC"
    assert held.t.notifications() == {}
    with pytest.raises(nixl.nixlRepostActiveError):
        agent.transfer(first)
    with pytest.raises(nixl.nixlNotAllowedError):
        held.i.deregister()
    one, two, three = network.pending
    network.deliver(three)
    network.deliver(two)
    assert held.t.notifications() == {"i": [b"3", b"2"]}
    assert page(held.t, 1) == page(held.i, 1)
    assert page(held.t, 0) == before[:PAGE]
    assert agent.check_xfer_state(first) == "PROC"
    network.deliver(one)
    assert agent.check_xfer_state(first) == agent.check_xfer_state(second) == "DONE"
    held.i.deregister()


def test_an_abort_ends_when_the_target_acknowledges_it(held: World) -> None:
    handle = held.handle("WRITE", [0], [0], b"never")
    before = held.t.content()
    held.i.agent.transfer(handle)
    held.i.agent.abort(handle)
    assert held.i.agent.check_xfer_state(handle) == "PROC"
    held.network.deliver_all()
    with pytest.raises(nixl.nixlCancelledError):
        held.i.agent.check_xfer_state(handle)
    assert held.t.content() == before
    assert held.t.notifications() == {}
    held.i.agent.transfer(handle)
    held.network.deliver_all()
    assert held.i.agent.check_xfer_state(handle) == "DONE"


def test_what_is_dropped_fails(held: World) -> None:
    handle = held.handle()
    held.i.agent.transfer(handle)
    held.i.agent.send_notif("t", b"lost")
    for item in list(held.network.pending):
        held.network.drop(item)
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        held.i.agent.check_xfer_state(handle)
    assert held.t.notifications() == {}


@pytest.mark.parametrize("victim", ["i", "t"])
def test_a_killed_agent_takes_what_is_pending_along(held: World, victim: str) -> None:
    handle = held.handle(message=b"never")
    held.i.agent.transfer(handle)
    before = held.t.content()
    held.network.kill(victim)
    assert held.network.pending == []
    assert held.t.content() == before
    if victim == "t":
        with pytest.raises(nixl.nixlRemoteDisconnectError):
            held.i.agent.check_xfer_state(handle)
        assert held.i.state("t") == "dead"


def test_removing_a_peer_cancels_what_is_pending(held: World) -> None:
    handle = held.handle()
    held.i.agent.transfer(handle)
    held.i.agent.remove_remote_agent("t")
    with pytest.raises(nixl.nixlCancelledError):
        held.i.agent.check_xfer_state(handle)
    assert held.network.pending == []


def test_the_target_decides_when_it_is_delivered(held: World) -> None:
    handle = held.handle(message=b"never")
    held.i.agent.transfer(handle)
    held.t.deregister()
    held.network.deliver()
    with pytest.raises(nixl.nixlNotFoundError):
        held.i.agent.check_xfer_state(handle)


def test_names_are_unique_on_a_network() -> None:
    network = nixl.FakeNetwork()
    with nixl.agent("fake", name="a", network=network) as one:
        with pytest.raises(ValueError, match="'a'"):
            nixl.agent("fake", name="a", network=network)
        assert one.name == "a"
    nixl.agent("fake", name="a", network=network).close()


def test_arguments_of_the_other_backend_are_refused() -> None:
    for arguments in (
        {"backend": "fake"},
        {"backend": "ucx", "network": nixl.FakeNetwork()},
        {"backend": "tcp"},
        {"backend": "ucx", "secret": b""},
    ):
        with pytest.raises(ValueError, match=r"network|backend|secret"):
            nixl.agent(name="a", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name"):
        nixl.agent("fake", name="", network=nixl.FakeNetwork())


def test_tensors_are_descriptors() -> None:
    torch = pytest.importorskip("torch")
    with nixl.agent("fake", name="a", network=nixl.FakeNetwork()) as agent:
        pool = torch.zeros(4, 8, dtype=torch.bfloat16)
        assert agent.get_xfer_descs(pool)[0] == (pool.data_ptr(), 64, 0)
        several = agent.get_reg_descs([pool[0], pool[2]])
        assert several.descCount() == 2
        assert several[1] == (pool.data_ptr() + 32, 16, 0, b"")
        assert agent.register_memory(several) is several
        for misuse in ([pool.T], pool[:, ::2], [pool, torch.zeros(1, device="meta")]):
            with pytest.raises(nixl.nixlInvalidParamError):
                agent.get_xfer_descs(misuse)


def test_misuse_of_descriptors_raises() -> None:
    with nixl.agent("fake", name="a", network=nixl.FakeNetwork()) as agent:
        reg = agent.get_reg_descs([(1, 2, 0, "m")], "DRAM")
        xfer = agent.get_xfer_descs([(1, 2, 0)], "DRAM")
        assert agent.get_xfer_descs(xfer) is xfer
        for call in (
            lambda: agent.get_xfer_descs(reg),
            lambda: agent.get_reg_descs(xfer),
            lambda: agent.get_xfer_descs([(1, 2, 0)]),
            lambda: agent.get_xfer_descs([(1, 2, 0, "m")], "DRAM"),
            lambda: agent.get_reg_descs([(1, 2, 0)], "DRAM"),
            lambda: agent.get_xfer_descs("pages", "DRAM"),
        ):
            with pytest.raises(nixl.nixlInvalidParamError):
                call()
        with pytest.raises(KeyError):
            agent.get_xfer_descs([(1, 2, 0)], "RAM")
        with pytest.raises(IndexError):
            agent.get_xfer_descs([], "DRAM")
        with pytest.raises(TypeError):
            nixl.nixl_agent_config(sync_mode=1)  # type: ignore[arg-type]


def test_lists_behave_as_nixls_do() -> None:
    dram = nixl.nixl_mem_t.DRAM_SEG
    xfer = nixl.nixlXferDList(dram, np.array([[1, 2, 0], [3, 4, 0]], np.int64))
    xfer.addDesc((5, 6, 1))
    assert xfer.descCount() == 3
    assert xfer[2] == (5, 6, 1)
    assert xfer.index((3, 4, 0)) == 1
    xfer[0] = (9, 9, 9)
    xfer.remDesc(1)
    assert xfer == nixl.nixlXferDList(dram, [(9, 9, 9), (5, 6, 1)])
    assert xfer != nixl.nixlXferDList(nixl.nixl_mem_t.VRAM_SEG, [(9, 9, 9), (5, 6, 1)])
    with pytest.raises(IndexError):
        xfer.remDesc(2)
    with pytest.raises(IndexError):
        xfer[-1]
    with pytest.raises(nixl.nixlNotFoundError):
        xfer.index((0, 0, 0))
    xfer.clear()
    assert xfer.isEmpty()
    assert xfer, "an empty list is true, as upstream"
    reg = nixl.nixlRegDList(dram, [(1, 2, 0, "text")])
    reg.append((3, 4, 0, b"bytes"))
    assert [reg[0], reg[1]] == [(1, 2, 0, b"text"), (3, 4, 0, b"bytes")]
    assert reg.trim() == nixl.nixlXferDList(dram, [(1, 2, 0), (3, 4, 0)])
    assert reg != nixl.nixlRegDList(dram, [(1, 2, 0, ""), (3, 4, 0, "")])
    assert nixl.nixlXferDList(dram, 3).descCount() == 3
    for bad in (np.zeros((2, 2), np.uint64), np.zeros((2, 3)), np.zeros((3, 2), np.uint64).T):
        with pytest.raises(ValueError, match="descriptors"):
            nixl.nixlXferDList(dram, bad)
    with pytest.raises(TypeError):
        nixl.nixlXferDList(dram, [[1, 2, 0]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="fields"):
        nixl.nixlRegDList(dram, [(1, 2, 0)])


def test_the_public_names() -> None:
    assert [name for name in nixl.__all__ if not hasattr(nixl, name)] == []
    errors = [name for name in nixl.__all__ if name.endswith("Error")]
    assert len(errors) == 12
    # As upstream: no common base.
    assert all(getattr(nixl, name).__bases__ == (Exception,) for name in errors)
