"""The worker's end of the transfers, over the in-memory agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pd_cluster.cache.layout import LayerFirstLayout, PageFirstLayout, make_layout
from pd_cluster.errors import StartError
from pd_cluster.types import AttemptId, IntArray, PagesWritten, StartPrefill, WorkerId
from pd_cluster.worker.checksums import page_checksums
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Connect,
    PagesCorrupt,
    PeerLost,
    ReadPages,
    TransferEnded,
    VerifyPages,
    WritePages,
)
from pd_cluster.worker.transport import Transport
from pd_transfer import FakeNetwork, agent

PAGES = 16
A, B = WorkerId("prefill-0", "aa"), WorkerId("decode-0", "bb")
ATTEMPT = AttemptId("r", 1)


class PageFirstOnGpu(PageFirstLayout):
    mem_type = "VRAM"  # for the fake agent, to which that is the host's memory all the same


class LayerFirstOnGpu(LayerFirstLayout):
    mem_type = "VRAM"


ON_GPU = {"page_first": PageFirstOnGpu, "layer_first": LayerFirstOnGpu}


class Pair:
    """Two workers' transports: A writes to and reads from B."""

    def __init__(
        self,
        layout: str,
        max_pages: int = PAGES,
        verify: bool = False,
        on_gpu: tuple[WorkerId, ...] = (),
    ) -> None:
        self.network = FakeNetwork()
        self.events: dict[WorkerId, list[Any]] = {A: [], B: []}
        self.sides: dict[WorkerId, Transport] = {}
        for seed, name in enumerate((A, B)):
            memory = make_layout(layout, PAGES, 2, 1, 2, 4, torch.float32, "cpu")
            memory.buffer.copy_(
                torch.randn(memory.buffer.shape, generator=torch.Generator().manual_seed(seed))
            )
            if name in on_gpu:
                memory.__class__ = ON_GPU[layout]
            made = agent("fake", name=str(name), secret=b"s", network=self.network)
            self.sides[name] = Transport(
                made,
                memory,
                self.events[name].append,
                max_inflight_bytes=max_pages * memory.page_bytes,
                verify=verify,
            )
        target = self.sides[B]
        self.sides[A].connect(Connect(B, target.metadata, target.layout.region()))

    def told(self, worker: WorkerId) -> list[Any]:
        """What the scheduler of a worker hears of its agent's events so far."""
        out: list[Any] = []
        while self.events[worker]:
            out += self.sides[worker].translate(self.events[worker].pop(0))
        return out

    def pages(self, worker: WorkerId, pages: IntArray) -> bytes:
        return page_checksums(self.sides[worker].layout, pages)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def written(attempt: Any, count: int) -> PagesWritten:
    return PagesWritten(attempt=attempt, first=0, count=count)


def write(transfer: int, source: IntArray, target: IntArray, attempt: Any = ATTEMPT) -> WritePages:
    return WritePages(transfer, B, source, target, written(attempt, len(source)))


@pytest.fixture(params=["page_first", "layer_first"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


def test_checksums_are_of_content_not_of_its_layout() -> None:
    sums = []
    for name in ("page_first", "layer_first"):
        memory = make_layout(name, PAGES, 2, 1, 2, 4, torch.float32, "cpu")
        memory.view(0, PAGES).copy_(torch.arange(PAGES * 2 * 2 * 8).view(PAGES, 2, 2, 1, 2, 4))
        sums.append(page_checksums(memory, ints(3, 1)))
        memory.view(1, 1)[0, 1, 1, 0, 1, 3] += 1
        assert page_checksums(memory, ints(3))[:4] == sums[-1][:4]
        assert page_checksums(memory, ints(1)) != sums[-1][4:]
    assert sums[0] == sums[1]


def test_portions_of_one_write_tell_their_own_pages(layout: str) -> None:
    pair = Pair(layout, max_pages=4)
    source, target = ints(*range(10)), ints(*range(15, 5, -1))
    assert pair.sides[A].move(write(7, source, target)) == []
    assert pair.told(A) == [TransferEnded(7)]
    told = pair.told(B)
    assert [(each.first, each.count) for each in told] == [(n, 1) for n in range(10)]
    assert pair.pages(B, target) == pair.pages(A, source)
    ((peer, pages, seconds),) = pair.sides[A].take_written()
    assert (peer, pages) == (B, 10)
    assert seconds > 0
    assert pair.sides[A].take_written() == []


def test_requests_share_what_may_be_in_flight(layout: str) -> None:
    pair = Pair(layout, max_pages=4)
    pair.network.hold = True
    other = AttemptId("s", 1)
    transport = pair.sides[A]
    assert transport.move(write(1, ints(0, 1, 2, 3, 4, 5), ints(0, 1, 2, 3, 4, 5))) == []
    assert transport.move(write(2, ints(6), ints(6), other)) == []
    assert len(pair.network.pending) == 4
    ends = []
    while pair.network.pending:
        pair.network.deliver()
        ends += pair.told(A)
        assert len(pair.network.pending) <= 4
    # The short one, asked for when four portions were in flight already, came next.
    assert ends == [TransferEnded(2), TransferEnded(1)]


def test_an_abort_ends_what_has_not_begun_at_once(layout: str) -> None:
    pair = Pair(layout, max_pages=1)
    pair.network.hold = True
    transport = pair.sides[A]
    transport.move(write(1, ints(0, 1), ints(0, 1)))
    transport.move(write(2, ints(2), ints(2)))
    assert transport.abort(AbortTransfer(2)) == [TransferEnded(2, "aborted")]
    assert transport.abort(AbortTransfer(1)) == []
    assert transport.abort(AbortTransfer(3)) == []
    assert pair.told(A) == []
    pair.network.deliver_all()
    (ended,) = pair.told(A)
    assert (ended.transfer, bool(ended.error)) == (1, True)
    assert not pair.network.pending


def test_all_transfers_of_a_dead_peer_end(layout: str) -> None:
    pair = Pair(layout, max_pages=1)
    pair.network.hold = True
    transport = pair.sides[A]
    for transfer in range(3):
        transport.move(write(transfer, ints(0, 1), ints(0, 1)))
    pair.network.kill(str(B))
    told = pair.told(A)
    assert {each.transfer for each in told if isinstance(each, TransferEnded)} == {0, 1, 2}
    assert all(each.error for each in told if isinstance(each, TransferEnded))
    assert PeerLost(B) in told
    assert transport.move(write(9, ints(0), ints(0))) == [TransferEnded(9, "peer lost")]


def test_a_corrupt_write_is_told_by_its_target(layout: str) -> None:
    pair = Pair(layout, verify=True)
    pair.network.corrupt = 1
    for expected in (PagesCorrupt(ATTEMPT), written(ATTEMPT, 1)):
        target = ints(9)
        pair.sides[A].move(write(1, ints(4), target))
        pair.told(A)
        (message,) = pair.told(B)
        assert len(message.checksums) == 4
        assert pair.sides[B].check(VerifyPages(message, target)) == expected


def test_a_corrupt_read_is_told_by_its_reader(layout: str) -> None:
    pair = Pair(layout, max_pages=8, verify=True)
    held = ints(5, 6, 7)
    request = StartPrefill(
        attempt=ATTEMPT,
        decode=B,
        agent=b"",
        region=(0, 0, 0),
        tokens=b"",
        params=None,  # type: ignore[arg-type]
        resident=0,
        pages=b"",
        prompt_len=0,
        timeout_s=1.0,
        held=held.tobytes(),
    )
    sealed = pair.sides[B].seal(request)
    assert isinstance(sealed, StartPrefill)
    pair.network.corrupt = 1
    for error in ("corrupt", ""):
        read = ReadPages(1, B, held, ints(0, 1, 2), ATTEMPT, sealed.held_checksums)
        assert pair.sides[A].move(read) == []
        assert pair.told(A) == [TransferEnded(1, error)]
    assert Pair(layout).sides[B].seal(request) is request


def test_without_verification_nothing_is_summed(layout: str) -> None:
    pair = Pair(layout)
    pair.network.corrupt = 1
    pair.sides[A].move(write(1, ints(4), ints(9)))
    assert pair.told(B) == [written(ATTEMPT, 1)]


@pytest.mark.parametrize("on_gpu", [(A, B), (A,), (B,)], ids=["both", "writer", "written"])
def test_pools_of_gpus_and_of_hosts_exchange_pages(layout: str, on_gpu: Any) -> None:
    pair = Pair(layout, verify=True, on_gpu=on_gpu)
    kinds = [side.registered.getType().name for side in pair.sides.values()]
    assert kinds == ["VRAM_SEG" if name in on_gpu else "DRAM_SEG" for name in pair.sides]
    source, target = ints(3, 4, 9), ints(15, 2, 1)
    assert pair.sides[A].move(write(7, source, target)) == []
    assert pair.told(A) == [TransferEnded(7)]
    [message] = pair.told(B)
    assert pair.sides[B].check(VerifyPages(message, target)) != PagesCorrupt(ATTEMPT)
    assert pair.pages(B, target) == pair.pages(A, source)
    assert pair.sides[A].move(ReadPages(8, B, ints(5, 6), ints(0, 1), ATTEMPT)) == []
    assert pair.told(A) == [TransferEnded(8)]
    assert pair.pages(A, ints(0, 1)) == pair.pages(B, ints(5, 6))


def test_a_pool_that_cannot_be_moved_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made = agent("fake", name="a", secret=b"s", network=FakeNetwork())
    monkeypatch.setattr(made._backend, "memory_types", list)
    memory = make_layout("page_first", PAGES, 2, 1, 2, 4, torch.float32, "cpu")
    with pytest.raises(StartError, match="the KV pool in DRAM cannot be moved"):
        Transport(made, memory, lambda event: None, max_inflight_bytes=1)
