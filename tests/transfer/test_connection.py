"""Who takes what a peer sends: the loop's thread, or one that waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pd_transfer.connection import Connection
from pd_transfer.dialed import DialedLink
from pd_transfer.enums import nixl_xfer_op_t
from pd_transfer.loop import Loop
from pd_transfer.messages import HEADER, Done, Message, encode
from tests.transfer.conftest import World
from tests.transfer.fuzz.harness import Scene, Stage
from tests.transfer.node import eventually


def never() -> bool:
    return False


class Ends:
    """A connection whose received messages are noted with the thread that took them."""

    def __init__(self) -> None:
        self.loop = Loop("l")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer = socket.create_connection(listener.getsockname())
            sock = listener.accept()[0]
        self.taken: list[tuple[Message, threading.Thread]] = []
        self.nested: list[bool] = []
        self.ended: list[str] = []
        self.connection = Connection(self.loop, sock, self._received, self.ended.append)
        self.loop.start()

    def _received(self, message: Message, body: bytes) -> None:
        self.nested.append(self.connection.take_here(0, never))
        self.taken.append((message, threading.current_thread()))

    def say(self, number: int) -> None:
        body = encode(Done(number))
        self.peer.sendall(HEADER.pack(len(body)) + body)

    def close(self) -> None:
        self.loop.stop(self.connection.close)
        self.peer.close()


@pytest.fixture
def ends(later: Callable[[Any], Any]) -> Ends:
    return later(Ends())


def test_a_waiting_thread_takes_what_comes_and_the_loop_what_comes_later(ends: Ends) -> None:
    with ends.loop.turn:  # the loop's thread cannot be faster
        ends.say(1)
        assert ends.connection.take_here(30_000, never)
    assert ends.taken == [(Done(1), threading.current_thread())]
    ends.say(2)
    eventually(lambda: len(ends.taken) == 2)
    assert ends.taken[1] == (Done(2), ends.loop._thread)
    assert ends.nested == [False, False]


def test_the_end_of_a_connection_is_told_once_wherever_it_is_noticed(ends: Ends) -> None:
    with ends.loop.turn:
        ends.peer.close()
        assert ends.connection.take_here(30_000, never)
        assert ends.ended == ["connection closed"]
    assert not ends.connection.take_here(30_000, never)
    assert ends.ended == ["connection closed"]


def test_nobody_waits_for_what_has_happened(ends: Ends) -> None:
    assert ends.connection.take_here(10**9, lambda: True)
    ends.say(1)
    eventually(lambda: ends.taken == [(Done(1), ends.loop._thread)])


def test_nobody_waits_while_the_loop_is_at_work(ends: Ends) -> None:
    working, go_on = threading.Event(), threading.Event()
    ends.loop.call(lambda: (working.set(), go_on.wait(30), None)[2])
    assert working.wait(30)
    try:
        assert not ends.connection.take_here(30_000, never)
    finally:
        go_on.set()


def test_what_is_left_to_do_wakes_the_loop(ends: Ends) -> None:
    done = threading.Event()

    class Work:
        def progress(self) -> bool:
            done.set()
            return True

    with ends.loop.turn:
        ends.loop.stand_in(lambda: ends.loop.busy(Work()))
    assert done.wait(30)


def test_callbacks_come_from_the_agents_thread(later: Callable[[Any], Any]) -> None:
    world = World("processes", later)
    world.meet()
    world.run(world.handle())
    threads: list[threading.Thread] = []
    world.i.agent.set_event_callback(lambda event: threads.append(threading.current_thread()))
    for _ in range(20):
        world.run(world.handle())
    eventually(lambda: len(threads) == 20)
    assert threading.current_thread() not in threads


def test_bytes_that_are_on_their_way_are_waited_for_elsewhere() -> None:
    """No message tells the end of a read through sockets, so none is waited for."""
    stage = Stage(Scene.ISSUING_TCP)
    try:
        assert isinstance(stage.link, DialedLink)
        for post in stage.posted:
            reads = post.operation == nixl_xfer_op_t.NIXL_READ
            assert stage.link.take_here(post, 0.0) != reads
    finally:
        stage.close()
