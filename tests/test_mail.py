"""Messages between actors over lines of their own: in order, proven, and handed back if unsure."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

from pd_cluster.mail import MAX_MESSAGE, Mail

SECRET = secrets.token_bytes(32)
WAIT_S = 30.0

Received = queue.SimpleQueue[bytes]


def never() -> None:
    raise AssertionError("handed back")


@pytest.fixture
def offices() -> Iterator[Callable[..., tuple[Mail, Received]]]:
    """Makes post offices, and closes them."""
    with ExitStack() as stack:

        def make(name: str, secret: bytes = SECRET) -> tuple[Mail, Received]:
            received: Received = queue.SimpleQueue()
            mail = Mail(name, "127.0.0.1", secret, received.put)
            stack.callback(mail.close)
            return mail, received

        yield make


def open_line(sender: Mail, recipient: Mail, received: Received) -> None:
    assert sender.wanted(recipient.name)
    sender.dial(recipient.name, recipient.address)
    ask_until(lambda: sender.send(recipient.name, b"hello", never))
    assert received.get(timeout=WAIT_S) == b"hello"


def ask_until(ready: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if ready():
            return
        pause.wait(0.01)
    raise AssertionError("not within the time")


@contextmanager
def stranger(mail: Mail) -> Iterator[Connection]:
    with Connection(socket.create_connection(mail.address).detach()) as connection:
        yield connection


def test_messages_arrive_whole_and_in_order_both_ways(
    offices: Callable[..., tuple[Mail, Received]],
) -> None:
    (one, to_one), (other, to_other) = offices("one"), offices("other")
    open_line(one, other, to_other)
    open_line(other, one, to_one)
    sizes = [0, 1, 100, 20_000, 3_000_000]  # below and above what goes in one write
    messages = [secrets.token_bytes(size) for size in sizes * 20]

    def send_all(sender: Mail, recipient: str) -> None:
        for message in messages:
            assert sender.send(recipient, message, never)

    threads = [
        threading.Thread(target=send_all, args=(one, "other")),
        threading.Thread(target=send_all, args=(other, "one")),
    ]
    for thread in threads:
        thread.start()
    for received in (to_one, to_other):
        assert [received.get(timeout=WAIT_S) for _ in messages] == messages
    for thread in threads:
        thread.join()


def test_without_a_line_nothing_is_sent(offices: Callable[..., tuple[Mail, Received]]) -> None:
    mail, _ = offices("one")
    assert not mail.send("other", b"x", never)
    assert mail.wanted("other")
    assert not mail.wanted("other"), "asked for once, it is being looked for"


def test_what_is_unsure_when_a_line_ends_is_handed_back(
    offices: Callable[..., tuple[Mail, Received]],
) -> None:
    sender, _ = offices("sender")
    taken, hold = threading.Event(), threading.Event()

    def stuck(_: bytes) -> None:
        taken.set()
        hold.wait(WAIT_S)

    slow = Mail("slow", "127.0.0.1", SECRET, stuck)
    handed_back: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        sender.dial("slow", slow.address)
        ask_until(lambda: sender.send("slow", b"", lambda: handed_back.put(-1)))
        assert taken.wait(WAIT_S)
        for number in range(3):
            assert sender.send("slow", b"", partial(handed_back.put, number))
    finally:
        # Its life ends in the middle of the first message: none was acknowledged.
        for connection in list(slow._callers):
            with socket.socket(fileno=os.dup(connection.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        hold.set()
        slow.close()
    assert [handed_back.get(timeout=WAIT_S) for _ in range(4)] == [-1, 0, 1, 2]
    assert not sender.send("slow", b"", never)
    assert sender.wanted("slow"), "somebody may be there again"


def test_acknowledged_messages_are_not_handed_back(
    offices: Callable[..., tuple[Mail, Received]],
) -> None:
    (sender, _), (recipient, received) = offices("sender"), offices("recipient")
    open_line(sender, recipient, received)
    line = sender._lines["recipient"]
    handed_back: queue.SimpleQueue[int] = queue.SimpleQueue()
    assert sender.send("recipient", b"", partial(handed_back.put, 1))
    ask_until(lambda: not line.unsure)
    # Its life ends at once, and says nothing more.
    recipient._acknowledge_since = lambda latest: None  # type: ignore[method-assign]
    recipient.close()
    ask_until(lambda: "recipient" not in sender._lines)
    sender.close()
    assert handed_back.empty()


@pytest.mark.parametrize(
    ("sizes", "acknowledged"),
    [([0] * 62, False), ([0] * 63, True), ([1 << 19], False), ([1 << 19] * 2, True)],
)
def test_acknowledgements_speak_for_many_messages_or_bytes(
    offices: Callable[..., tuple[Mail, Received]],
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    acknowledged: bool,
) -> None:
    monkeypatch.setattr("pd_cluster.mail.ACKNOWLEDGE_S", 1000.0)
    (sender, _), (recipient, received) = offices("sender"), offices("recipient")
    open_line(sender, recipient, received)  # which is one message
    line = sender._lines["recipient"]
    handed_back: queue.SimpleQueue[int] = queue.SimpleQueue()
    for size in sizes:
        assert sender.send("recipient", bytes(size), partial(handed_back.put, size))
    for size in sizes:
        assert len(received.get(timeout=WAIT_S)) == size
    if acknowledged:
        ask_until(lambda: not line.unsure)
    assert len(line.unsure) == (0 if acknowledged else 1 + len(sizes))
    recipient.close()  # which says what it has got
    ask_until(lambda: "recipient" not in sender._lines)
    sender.close()
    assert handed_back.empty()


@pytest.mark.parametrize(
    ("secret", "wants"), [(b"a guess", "recipient"), (SECRET, "its former life")]
)
def test_strangers_and_the_misled_are_turned_away(
    offices: Callable[..., tuple[Mail, Received]], secret: bytes, wants: str
) -> None:
    (sender, _), (recipient, received) = offices("sender", secret), offices("recipient")
    sender.dial(wants, recipient.address)
    ask_until(lambda: not any(each.name == "mail-dial" for each in threading.enumerate()))
    assert not sender.send(wants, b"x", never)
    assert received.empty()


def test_garbage_closes_that_line_only(offices: Callable[..., tuple[Mail, Received]]) -> None:
    (sender, _), (recipient, received) = offices("sender"), offices("recipient")
    open_line(sender, recipient, received)
    with stranger(recipient) as connection:  # before it has proved anything
        connection.recv_bytes()
        connection.send_bytes(b"\xff" * 16)
        assert connection.recv_bytes() == b"#FAILURE#"
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    with stranger(recipient) as connection:  # a member that announces too long a message
        answer_challenge(connection, SECRET)
        deliver_challenge(connection, SECRET)
        connection.send_bytes(b"recipient")
        connection.recv_bytes()
        os.write(connection.fileno(), struct.pack("!i", MAX_MESSAGE + 1))
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    assert sender.send("recipient", b"still there", never)
    assert received.get(timeout=WAIT_S) == b"still there"


def test_a_receiver_that_fails_does_not_end_the_line(
    offices: Callable[..., tuple[Mail, Received]],
) -> None:
    sender, _ = offices("sender")
    received: Received = queue.SimpleQueue()

    def fails_once(data: bytes) -> None:
        received.put(data)
        if data == b"bad":
            raise ValueError(data)

    recipient = Mail("recipient", "127.0.0.1", SECRET, fails_once)
    try:
        open_line(sender, recipient, received)
        for data in (b"bad", b"good"):
            assert sender.send("recipient", data, never)
            assert received.get(timeout=WAIT_S) == data
    finally:
        recipient.close()
