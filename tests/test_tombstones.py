"""What is remembered of ends that came too early, and for how long."""

from __future__ import annotations

from pd_cluster.tombstones import MAX_TOMBSTONES, TOMBSTONE_S, Tombstones
from pd_cluster.types import AttemptId


def test_an_early_end_is_told_once_and_of_that_attempt_alone() -> None:
    tombstones = Tombstones()
    tombstones.add(AttemptId("a", 1), 0.0)
    tombstones.add(AttemptId("a", 1), 0.0)  # asked again
    assert not tombstones.take(AttemptId("a", 0))
    assert tombstones.take(AttemptId("a", 1))
    assert not tombstones.take(AttemptId("a", 1))


def test_memory_is_bounded_by_number_and_by_time() -> None:
    tombstones = Tombstones()
    for number in range(MAX_TOMBSTONES + 5):
        tombstones.add(AttemptId("a", number), float(number > 100))
    assert len(tombstones) == MAX_TOMBSTONES
    assert not tombstones.take(AttemptId("a", 4))
    assert tombstones.take(AttemptId("a", 5))
    tombstones.expire(TOMBSTONE_S)
    assert not tombstones.take(AttemptId("a", 100))
    assert tombstones.take(AttemptId("a", 101))
    tombstones.expire(TOMBSTONE_S + 1.0)
    assert not len(tombstones)
