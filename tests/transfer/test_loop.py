from __future__ import annotations

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
