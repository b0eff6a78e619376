from __future__ import annotations

import pytest

from pd_transfer import spin
from pd_transfer.spin import LOOK_OUT, Spin, cores_are_taken


class Peer:
    """Answers after so many seconds; a look takes a microsecond, a sleep as long as the answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = 0.0
        self.looks = 0
        self.sleeps = 0
        self.crowd = False
        self.glances = 0
        self.spin = Spin(lambda: self.now, self.crowded)

    def crowded(self) -> bool:
        self.glances += 1
        return self.crowd

    def look(self) -> bool:
        self.looks += 1
        self.now += 1e-6
        return self.now >= self.due

    def sleep(self) -> bool:
        self.sleeps += 1
        self.now = max(self.now, self.due)
        return True

    def answers(self, *after: float) -> None:
        for seconds in after:
            self.looks = self.sleeps = 0
            self.due = self.now + seconds
            assert self.spin.wait(self.look, self.sleep)
            assert self.now >= self.due


def test_a_conversation_is_followed_awake() -> None:
    peer = Peer()
    peer.answers(LOOK_OUT / 2)
    assert (peer.looks, peer.sleeps) == (0, 1)
    for _ in range(3):
        peer.answers(LOOK_OUT / 2)
        assert peer.looks > 0
        assert peer.sleeps == 0


def test_what_is_spoken_to_now_and_then_sleeps_at_once() -> None:
    peer = Peer()
    for _ in range(3):
        peer.answers(0.01)
        assert (peer.looks, peer.sleeps) == (0, 1)


def test_the_look_out_is_short_and_its_failure_the_last() -> None:
    peer = Peer()
    peer.answers(LOOK_OUT / 2, 1.0)
    assert peer.sleeps == 1
    assert 0 < peer.looks <= LOOK_OUT * 1e6 + 2
    peer.answers(1.0)
    assert (peer.looks, peer.sleeps) == (0, 1)
    peer.answers(LOOK_OUT / 2)  # heard while asleep: from here on it pays again
    peer.answers(LOOK_OUT / 2)
    assert peer.sleeps == 0


def test_it_is_in_nobodys_way() -> None:
    peer = Peer()
    peer.answers(LOOK_OUT / 2, LOOK_OUT / 2)
    assert peer.looks > 0
    peer.crowd = True
    peer.now += 1.0
    for _ in range(3):
        peer.answers(LOOK_OUT / 2)
        assert (peer.looks, peer.sleeps) == (0, 1)
    peer.crowd = False
    peer.now += 1.0
    peer.answers(LOOK_OUT / 2)
    assert (peer.looks > 0, peer.sleeps) == (True, 0)


def test_it_looks_around_once_in_a_while() -> None:
    peer = Peer()
    peer.answers(*[LOOK_OUT / 10] * 50)
    assert peer.glances == 1


def test_the_cores_are_taken_when_more_want_to_run_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spin, "_CORES", 1 << 20)
    assert not cores_are_taken()
    monkeypatch.setattr(spin, "_CORES", 0)  # this thread is one that runs
    assert cores_are_taken()


def test_a_wait_that_ends_without_news_is_no_answer() -> None:
    waits, looks = Spin(lambda: 0.0, lambda: False), []
    for _ in range(2):
        assert not waits.wait(lambda: looks.append(1) is None, lambda: False)
    assert not looks
