"""What every backend must do. The same tests, in memory, over UCX, and between two processes."""

from __future__ import annotations

import queue
import secrets
from typing import Any

import msgspec
import numpy as np
import pytest

import pd_transfer as nixl
from pd_transfer import metadata as wire_metadata
from tests.transfer.conftest import World
from tests.transfer.node import PAGE, PAGES, eventually, rows


def pages(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8).reshape(-1, PAGE)


def arrived(world: World, sender: str = "i") -> list[bytes]:
    return eventually(lambda: world.t.notifications().get(sender))


def test_write_lands_in_the_chosen_pages_only(world: World) -> None:
    world.meet()
    before = pages(world.t.content())
    local, remote = [3, 4, 9, 0, 63], [10, 11, 2, 40, 0]
    handle = world.handle("WRITE", local, remote, b"written")
    world.i.agent.transfer(handle)
    # The target's application does nothing but look; the initiator's does not even poll.
    assert arrived(world) == [b"written"]
    expected = before.copy()
    expected[remote] = pages(world.i.content())[local]
    assert np.array_equal(pages(world.t.content()), expected)
    assert world.finish(handle) == "DONE"


def test_read_fetches_the_chosen_pages_only(world: World) -> None:
    world.meet()
    before, there = pages(world.i.content()).copy(), pages(world.t.content())
    local, remote = [1, 2, 50], [7, 3, 3]
    assert world.run(world.handle("READ", local, remote, b"read")) == "DONE"
    before[local] = there[remote]
    assert np.array_equal(pages(world.i.content()), before)
    assert arrived(world) == [b"read"]
    assert np.array_equal(pages(world.t.content()), there)


def test_a_handle_can_be_posted_again_with_another_notification(world: World) -> None:
    world.meet()
    handle = world.handle(message=b"first")
    assert world.run(handle) == "DONE"
    assert arrived(world) == [b"first"]
    world.i.memory[:PAGE] = 7
    world.i.agent.transfer(handle, b"second")
    assert world.finish(handle) == "DONE"
    assert arrived(world) == [b"second"]
    assert world.t.content()[:PAGE] == b"\7" * PAGE
    assert world.run(handle) == "DONE"
    assert arrived(world) == [b"second"]


def test_counters_tell_descriptors_from_merged_runs(world: World) -> None:
    world.meet()
    # 0,1,2 are contiguous on both sides, 5,6 only here.
    handle = world.handle("WRITE", [0, 1, 2, 5, 6], [4, 5, 6, 9, 8], b"x")
    assert world.run(handle) == "DONE"
    arrived(world)
    mine = world.i.agent.statistics()
    assert (mine.bytes_written, mine.descriptors_written, mine.runs_written) == (5 * PAGE, 5, 3)
    assert (mine.handles_open, mine.transfers_active, mine.transfers_done) == (1, 0, 1)
    assert mine.notifications_sent == 1
    theirs = world.t.counters()
    assert theirs["bytes_received"] == 5 * PAGE
    assert theirs["descriptors_received"] == 5
    assert theirs["runs_received"] == 3
    assert theirs["notifications_received"] == 1
    with pytest.raises(AttributeError):
        mine.bytes_written = 0  # type: ignore[misc]


def test_misuse_of_prepared_sides(world: World) -> None:
    world.meet()
    agent = world.i.agent
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(world.i.memory, PAGE), "DRAM")
    theirs = agent.prep_xfer_dlist(b"t", world.target_rows(), "DRAM")
    halves = agent.prep_xfer_dlist("", rows(world.i.memory, PAGE // 2), "DRAM")
    for local, i, remote, j in [
        (theirs, [0], mine, [0]),
        (mine, [], theirs, []),
        (mine, [0, 1], theirs, [0]),
        (mine, [PAGES], theirs, [0]),
        (mine, [0], theirs, [-1]),
        (mine, np.zeros((1, 1), int), theirs, [0]),
        (mine, np.zeros(1), theirs, [0]),
        (halves, [0], theirs, [0]),
    ]:
        with pytest.raises(nixl.nixlInvalidParamError):
            agent.make_prepped_xfer("WRITE", local, i, remote, j)
    with pytest.raises(KeyError):
        agent.make_prepped_xfer("PUSH", mine, [0], theirs, [0])
    with pytest.raises(nixl.nixlNotFoundError):
        agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0], backends=["GDS"])
    agent.release_dlist_handle(mine)
    with pytest.raises(nixl.nixlInvalidParamError):
        agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])


def test_only_registered_memory_can_be_prepared(world: World) -> None:
    world.meet()
    agent = world.i.agent
    end = world.t.address() + PAGES * PAGE
    for peer, address, length in [
        ("t", end - 1, 2),
        ("t", world.t.address() - 1, 1),
        ("t", end, 1),
        ("t", 2**64 - 2, 2),
        ("", world.i.address() + PAGES * PAGE - 1, 2),
        ("nobody", world.t.address(), 1),
    ]:
        with pytest.raises(nixl.nixlNotFoundError):
            agent.prep_xfer_dlist(peer, [(address, length, 0)], "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        agent.prep_xfer_dlist("t", [(world.t.address(), 1, 1)], "DRAM")
    agent.prep_xfer_dlist("t", [(end - 1, 1, 0)], "DRAM")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_memory_that_was_deregistered_since_is_refused(
    world: World, operation: str, again: bool
) -> None:
    world.meet()
    handle = world.handle(operation, [0, 1], [0, 1], b"never")
    world.t.deregister()
    if again:
        world.t.register()  # the same addresses, but not what the metadata was about
    before, mine = world.t.content(), world.i.content()
    with pytest.raises(nixl.nixlNotFoundError):
        world.run(handle)
    assert world.t.content() == before
    assert world.i.content() == mine
    assert world.t.notifications() == {}
    assert world.i.agent.statistics().transfers_failed == 1
    # The connection survives, and newer metadata of the same peer may be loaded.
    if again:
        world.meet()
        assert world.run(world.handle(operation, [0], [1])) == "DONE"


def test_own_memory_that_was_deregistered_since_is_refused(world: World) -> None:
    world.meet()
    handle = world.handle()
    world.i.deregister()
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.transfer(handle)


def test_a_stale_generation_is_refused(world: World) -> None:
    stale = wire_metadata.decode(world.t.metadata())
    world.i.add(wire_metadata.encode(msgspec.structs.replace(stale, generation=b"x" * 16)))
    before = world.t.content()
    with pytest.raises(nixl.nixlNotFoundError):
        world.run(world.handle())
    assert world.t.content() == before


def test_another_secret_is_refused(world: World) -> None:
    world.t.close()
    world.t = world.remote("t", secret=b"of another cluster")
    world.meet()
    before = world.t.content()
    with pytest.raises(nixl.nixlNotAllowedError):
        world.run(world.handle(message=b"let me in"))
    assert world.t.content() == before
    assert world.t.notifications() == {}


def test_notifications_both_ways_and_to_oneself(world: World) -> None:
    world.meet()
    world.t.add(world.i.metadata())
    for n in range(20):
        world.i.agent.send_notif("t", b"%d" % n)
    got: list[bytes] = []
    eventually(lambda: got.extend(world.t.notifications().get("i", [])) or len(got) == 20)
    assert got == [b"%d" % n for n in range(20)]
    world.t.send("i", b"back")
    assert eventually(world.i.notifications) == {"t": [b"back"]}
    world.i.agent.send_notif("i", b"self")
    assert world.i.notifications() == {"i": [b"self"]}
    assert world.i.notifications() == {}
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.send_notif("nobody", b"")


def test_removed_and_added_again_is_another_peer(world: World) -> None:
    world.meet()
    handle = world.handle()
    assert world.run(handle) == "DONE"
    assert world.i.agent.check_remote_metadata("t")
    world.i.agent.remove_remote_agent("t")
    world.i.agent.remove_remote_agent("nobody")
    assert not world.i.agent.check_remote_metadata("t")
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.transfer(handle)
    with pytest.raises(nixl.nixlNotFoundError):
        world.handle()
    eventually(lambda: world.i.quiet("t"))
    world.meet()
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.transfer(handle)
    assert world.run(world.handle()) == "DONE"
    # Being removed by a peer is not that peer's death.
    assert world.t.state("i") == "alive"


def test_metadata(world: World) -> None:
    data = world.t.metadata()
    assert world.i.agent.add_remote_agent(data) == b"t"
    assert world.i.agent.add_remote_agent(data) == b"t"
    known = world.i.agent.get_xfer_descs(world.target_rows(), "DRAM")
    assert world.i.agent.check_remote_metadata("t", known)
    beyond = world.i.agent.get_xfer_descs([(world.t.address(), PAGES * PAGE + 1, 0)], "DRAM")
    assert not world.i.agent.check_remote_metadata("t", beyond)
    assert not world.i.agent.check_remote_metadata("nobody")
    with pytest.raises(nixl.nixlInvalidParamError):
        world.i.add(world.i.metadata())
    for garbage in [b"", b"garbage", data[:-1], data + b"x", secrets.token_bytes(200)]:
        with pytest.raises(nixl.nixlMismatchError):
            world.i.add(garbage)
    other = msgspec.structs.replace(wire_metadata.decode(data), generation=b"y" * 16)
    with pytest.raises(nixl.nixlNotAllowedError):
        world.i.add(wire_metadata.encode(other))
    newer = msgspec.structs.replace(wire_metadata.decode(data), version=99)
    with pytest.raises(nixl.nixlMismatchError):
        world.i.add(wire_metadata.encode(newer))


def test_the_states_of_a_handle(world: World) -> None:
    world.meet()
    handle = world.handle()
    assert repr(handle) == f"nixl_xfer_handle({int(handle):#x}, released=False)"
    with pytest.raises(nixl.nixlNotPostedError):
        world.i.agent.check_xfer_state(handle)
    with pytest.raises(nixl.nixlNotPostedError):
        world.i.agent.abort(handle)
    assert world.run(handle) == "DONE"
    world.i.agent.abort(handle)
    assert world.i.agent.check_xfer_state(handle) == "DONE"
    world.i.agent.release_xfer_handle(handle)
    handle.release()
    for use in (world.i.agent.transfer, world.i.agent.check_xfer_state, world.i.agent.abort):
        with pytest.raises(nixl.nixlInvalidParamError):
            use(handle)
    assert world.i.agent.statistics().handles_open == 0
    other = world.local("other")
    with pytest.raises(nixl.nixlInvalidParamError):
        other.agent.transfer(world.handle())


def test_dropping_a_handle_releases_it(world: World) -> None:
    world.meet()
    handle = world.handle()
    assert world.run(handle) == "DONE"
    del handle
    assert world.i.agent.statistics().handles_open == 0


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_an_agent_transfers_within_itself(world: World, operation: str) -> None:
    agent = world.i.agent
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(world.i.memory, PAGE), "DRAM")
    own = agent.prep_xfer_dlist("i", rows(world.i.memory, PAGE), "DRAM")
    before = pages(world.i.content())
    assert world.run(agent.make_prepped_xfer(operation, mine, [1], own, [2], b"moved")) == "DONE"
    after = pages(world.i.content())
    moved_to, moved_from = (2, 1) if operation == "WRITE" else (1, 2)
    assert np.array_equal(after[moved_to], before[moved_from])
    assert world.i.notifications() == {"i": [b"moved"]}


def test_events_wake_the_application(world: World) -> None:
    events: queue.SimpleQueue[nixl.Event] = queue.SimpleQueue()
    world.i.agent.set_event_callback(events.put)
    world.meet()
    world.t.add(world.i.metadata())
    handle = world.handle()
    world.i.agent.transfer(handle)
    assert events.get(timeout=30) == nixl.Event("transfer", "t", int(handle))
    # No polling: what the event tells of can be seen already.
    assert world.i.agent.check_xfer_state(handle) == "DONE"
    world.t.send("i", b"hello")
    assert events.get(timeout=30) == nixl.Event("notification", "t")
    assert world.i.notifications() == {"t": [b"hello"]}
    world.t.kill()
    assert events.get(timeout=30) == nixl.Event("peer", "t")
    assert world.i.state("t") == "dead"


def test_a_failing_callback_stops_nothing(world: World) -> None:
    def fail(event: nixl.Event) -> None:
        raise RuntimeError("the application's mistake")

    world.i.agent.set_event_callback(fail)
    world.meet()
    assert world.run(world.handle(message=b"one")) == "DONE"
    assert world.run(world.handle(message=b"two")) == "DONE"


def test_a_callback_may_use_the_agent(world: World) -> None:
    world.meet()
    second = world.handle(message=b"second")

    def post(event: nixl.Event) -> None:
        world.i.agent.set_event_callback(None)
        world.i.agent.transfer(second)

    world.i.agent.set_event_callback(post)
    assert world.run(world.handle(message=b"first")) == "DONE"
    assert eventually(lambda: world.t.counters()["notifications_received"] == 2)
    assert world.finish(second) == "DONE"


def test_a_dead_peer_is_noticed(world: World) -> None:
    world.meet()
    handle = world.handle(message=b"x")
    assert world.run(handle) == "DONE"
    assert world.i.state("t") == "alive"
    assert not world.i.quiet("t")
    assert world.i.quiet("nobody")
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.state("nobody")
    world.t.kill()
    eventually(lambda: world.i.state("t") == "dead")
    assert world.i.quiet("t")
    assert not world.i.agent.check_remote_metadata("t")
    for use in (
        lambda: world.i.agent.transfer(handle),
        lambda: world.i.agent.send_notif("t", b"anyone there?"),
        world.handle,
    ):
        with pytest.raises(nixl.nixlRemoteDisconnectError):
            use()
    assert world.i.agent.check_xfer_state(handle) == "DONE"
    assert world.i.agent.statistics().peers_lost == 1


def test_a_dead_peer_may_be_followed_by_one_of_its_name(world: World) -> None:
    world.meet()
    old = world.handle()
    assert world.run(old) == "DONE"
    world.t.kill()
    eventually(lambda: world.i.state("t") == "dead")
    world.t = world.remote("t", seed=5)
    world.meet()
    assert world.i.state("t") == "alive"
    with pytest.raises(nixl.nixlNotFoundError):
        world.i.agent.transfer(old)
    assert world.run(world.handle("WRITE", [3], [4])) == "DONE"
    assert np.array_equal(pages(world.t.content())[4], pages(world.i.content())[3])


def test_a_target_notices_its_dead_initiator(world: World) -> None:
    world.meet()
    assert world.run(world.handle()) == "DONE"
    assert world.t.state("i") == "alive"
    assert not world.t.quiet("i")
    world.i.kill()
    eventually(lambda: world.t.state("i") == "dead")
    assert world.t.quiet("i")


def test_registration_is_checked(world: World) -> None:
    agent = world.i.agent
    with pytest.raises(nixl.nixlNotFoundError):
        agent.register_memory([(0, 4096, 0, "")], "FILE")
    with pytest.raises(nixl.nixlNotFoundError):
        agent.deregister_memory(agent.get_reg_descs([(1, 1, 0, "")], "DRAM"))
    extra = np.zeros(64, np.uint8)
    pair = agent.get_reg_descs(
        [(extra.ctypes.data, 64, 0, ""), (extra.ctypes.data + 1, 5, 0, "")], "DRAM"
    )
    agent.register_memory(agent.get_reg_descs([pair[0]], "DRAM"))
    # All or nothing: the second of the pair is not registered, so the first stays.
    with pytest.raises(nixl.nixlNotFoundError):
        agent.deregister_memory(pair)
    agent.prep_xfer_dlist("", [(extra.ctypes.data, 64, 0)], "DRAM")


def test_zero_length_descriptors_move_nothing(world: World) -> None:
    world.meet()
    agent = world.i.agent
    mine = agent.prep_xfer_dlist("", [(world.i.address(), 0, 0)], "DRAM")
    theirs = agent.prep_xfer_dlist("t", [(world.t.address(), 0, 0)], "DRAM")
    before = world.t.content()
    for operation in ("WRITE", "READ"):
        handle = agent.make_prepped_xfer(operation, mine, [0], theirs, [0], b"nothing")
        assert world.run(handle) == "DONE"
        assert arrived(world) == [b"nothing"]
    assert world.t.content() == before
