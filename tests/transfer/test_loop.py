from __future__ import annotations

import os
import threading

import pytest

from pd_transfer.loop import Loop


class Defective:
    def __init__(self) -> None:
        self.calls = 0

    def progress(self) -> bool:
        self.calls += 1
        raise KeyError("a defect")


def test_a_defect_in_one_progress_ends_neither_the_thread_nor_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, defective, alive = Loop("l"), Defective(), threading.Event()
    loop.start()
    try:
        loop.call(lambda: loop.busy(defective))
        loop.call(lambda: loop.later(0, alive.set) and None)
        assert alive.wait(30)
    finally:
        loop.stop(lambda: None)
    assert defective.calls == 1
    assert "a defect" in caplog.text


@pytest.mark.parametrize("allowed", [True, False])
def test_the_thread_goes_before_a_models_step_where_it_may(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    loop, alive = Loop("l"), threading.Event()
    asked: list[tuple[int, ...]] = []

    def set_priority(*arguments: int) -> None:
        asked.append((*arguments, threading.get_ident()))
        if not allowed:
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", set_priority)
    loop.start()
    idents: list[int] = []
    try:
        loop.call(lambda: (idents.append(threading.get_ident()), alive.set()) and None)
        assert alive.wait(30)
    finally:
        loop.stop(lambda: None)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert asked == [(os.PRIO_PROCESS, 0, usual - 10, idents[0])]
