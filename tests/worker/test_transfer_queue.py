from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.worker.transfer_queue import Portion, TransferQueue


def started(queue: TransferQueue) -> list[Portion]:
    out = []
    while (portion := queue.next()) is not None:
        out.append(portion)
    return out


def test_requests_take_turns_whatever_their_length() -> None:
    queue = TransferQueue(max_pages=8)
    queue.add(1, "long", 10)
    queue.add(2, "long", 3)
    queue.add(3, "short", 2)
    assert started(queue) == [
        Portion(1, 0, 2),
        Portion(3, 0, 2),
        Portion(1, 2, 2),
        Portion(1, 4, 2),
    ]
    queue.add(4, "late", 1)
    assert queue.ended(Portion(1, 0, 2)) is None
    # Whoever comes later waits for a portion of the others, not for all of them.
    assert started(queue) == [Portion(1, 6, 2)]
    assert queue.ended(Portion(3, 0, 2)) == ""
    assert started(queue) == [Portion(4, 0, 1)]


def test_no_more_than_allowed_is_in_flight() -> None:
    queue = TransferQueue(max_pages=3)
    queue.add(1, "a", 7)
    assert started(queue) == [Portion(1, 0, 1), Portion(1, 1, 1), Portion(1, 2, 1)]
    assert queue.in_flight == 3
    queue.ended(Portion(1, 1, 1))
    assert started(queue) == [Portion(1, 3, 1)]


def test_an_error_ends_a_transfer_once_nothing_of_it_is_in_flight() -> None:
    queue = TransferQueue(max_pages=8)
    queue.add(1, "a", 9)
    first, second, *others = started(queue)
    assert queue.ended(first, "broken") is None
    assert started(queue) == []
    for portion in others:
        assert queue.ended(portion) is None
    assert queue.ended(second, "later") == "broken"
    assert 1 not in queue
    assert queue.in_flight == 0


def test_what_has_not_begun_stops_at_once() -> None:
    queue = TransferQueue(max_pages=4)
    queue.add(1, "a", 4)
    queue.add(2, "a", 4)
    portions = started(queue)
    assert {portion.transfer for portion in portions} == {1}
    assert queue.stop(2, "aborted") == "aborted"
    # All of the first had been started: it ends as its last portion does.
    assert queue.stop(1, "aborted") is None
    assert [queue.ended(portion) for portion in portions] == [None, None, None, ""]
    assert len(queue) == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_page_is_started_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue = TransferQueue(max_pages=int(rng.integers(1, 20)))
    sizes = {n: int(rng.integers(1, 40)) for n in range(30)}
    seen: dict[int, list[int]] = {n: [] for n in sizes}
    waiting, flying, ends = list(sizes), [], []
    while waiting or len(queue):
        if waiting and rng.random() < 0.3:
            transfer = waiting.pop()
            queue.add(transfer, transfer % 4, sizes[transfer])
        for portion in started(queue):
            seen[portion.transfer] += range(portion.first, portion.first + portion.pages)
            flying.append(portion)
        assert queue.in_flight <= queue.max_pages
        if flying:
            portion = flying.pop(int(rng.integers(len(flying))))
            if queue.ended(portion) is not None:
                ends.append(portion.transfer)
    assert sorted(ends) == sorted(sizes)
    assert all(seen[n] == list(range(size)) for n, size in sizes.items())
