"""Whose pages a decode worker takes back when it has run out of them, and how many it takes.

    length     fewest output tokens first, the longest prompt of equals
    priority   lowest priority first, then as by length

The policy gives the order; what each victim really frees, its unshared pages, how many there are. A
sequence that was retracted `MAX_RETRACTIONS` times comes last, so that it gets done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pd_cluster.types import MAX_RETRACTIONS, AttemptId, RetractionPolicy
from pd_cluster.worker.page_table import freed_by
from pd_cluster.worker.sequence import Sequence


def by_length(seq: Sequence) -> tuple[int, ...]:
    return (seq.num_output, -seq.request.prompt_len)


def by_priority(seq: Sequence) -> tuple[int, ...]:
    return (seq.request.priority, *by_length(seq))


_KEYS: dict[RetractionPolicy, Callable[[Sequence], tuple[int, ...]]] = {
    "length": by_length,
    "priority": by_priority,
}


def in_order(policy: RetractionPolicy, sequences: Iterable[Sequence]) -> list[Sequence]:
    """Who goes first."""
    key = _KEYS[policy]
    return sorted(
        sequences, key=lambda seq: (seq.request.retractions >= MAX_RETRACTIONS, *key(seq))
    )


def enough(
    order: list[Sequence], needed: int, available: int, aside: Mapping[AttemptId, int]
) -> list[Sequence]:
    """The first of `order` whose leaving makes `needed` tokens available; none if even all are not
    enough. `aside` is what is set aside for the growth of each, and not needed without it.
    """
    for count in range(1, len(order) + 1):
        going = order[:count]
        freed = freed_by(seq.table for seq in going) * going[0].page_size
        if available + freed + sum(aside[seq.attempt] for seq in going) >= needed:
            return going
    return []
