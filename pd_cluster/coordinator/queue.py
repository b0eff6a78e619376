"""In which order waiting requests are placed.

A policy orders; it never keeps anyone out: each `OLDEST_EVERY`-th placement is offered to the
request that has waited longest, so under no policy, and whoever else arrives, does one starve.
Between tenants the one with the least placed work comes first; the policy orders within each. With
priority scheduling all of this holds within a priority, the higher come first, and only who has
waited for `PATIENCE_S` gets the oldest's turns.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pd_cluster.types import AttemptId, PlaceRequest

OLDEST_EVERY = 8
PATIENCE_S = 30.0
# Beyond so many waiting requests policies that look at prefixes order only the oldest ones.
MAX_COMPARED = 512


@dataclass(slots=True)
class Waiting:
    """A request in the queue. Times are seconds of the coordinator's clock."""

    request: PlaceRequest
    hashes: Sequence[int]
    arrived: float
    deadline: float
    number: int  # order of arrival
    matched: int = 0  # prompt tokens that some prefill worker held when last looked at
    not_before: float = 0.0  # its best worker is busy until then
    pledge: tuple[int, float] | None = None  # that worker's slot, and the seconds of work
    preempt_at: float = 0.0  # when to ask (again) that lower priorities make room


class QueuePolicy(ABC):
    name: str

    @abstractmethod
    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        """The next to be placed first. `waiting` is in order of arrival; `running` counts placed
        requests by routing key.
        """


class Fcfs(QueuePolicy):
    """First come, first served."""

    name = "fcfs"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        return waiting


class LongestPrefixMatch(QueuePolicy):
    """Most cached tokens first."""

    name = "lpm"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        head = sorted(waiting[:MAX_COMPARED], key=lambda each: -each.matched)
        return head + waiting[MAX_COMPARED:]


class DfsWeight(QueuePolicy):
    """Depth first through the tree of waiting prompts, the subtree with most requests first.

    So those that share a prefix run together while it is cached (RadixAttention's order).
    """

    name = "dfs-weight"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        head = waiting[:MAX_COMPARED]
        weight = Counter(key for each in head for key in each.hashes)
        ordered = sorted(
            head, key=lambda each: [part for key in each.hashes for part in (-weight[key], key)]
        )
        return ordered + waiting[MAX_COMPARED:]


class LongestOutputFirst(QueuePolicy):
    name = "lof"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        return sorted(waiting, key=lambda each: -each.request.max_tokens)


class Shuffled(QueuePolicy):
    name = "random"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        return self._rng.sample(waiting, len(waiting))


class ByPriority(QueuePolicy):
    """Highest priority first."""

    name = "priority"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        return sorted(waiting, key=lambda each: -each.request.priority)


class ByRoutingKey(QueuePolicy):
    """Those first whose routing key most placed requests have."""

    name = "routing-key"

    def order(self, waiting: list[Waiting], running: Mapping[str, int]) -> list[Waiting]:
        def count(each: Waiting) -> int:
            key = each.request.routing_key
            return running.get(key, 0) if key else 0

        return sorted(waiting, key=lambda each: -count(each))


_POLICIES: dict[str, type[QueuePolicy]] = {
    policy.name: policy
    for policy in (Fcfs, LongestPrefixMatch, DfsWeight, LongestOutputFirst, ByPriority)
} | {"routing-key": ByRoutingKey}


def make_queue_policy(name: str, seed: int = 0) -> QueuePolicy:
    """ValueError if there is no such policy."""
    if name == Shuffled.name:
        return Shuffled(seed)
    if name not in _POLICIES:
        allowed = ", ".join((*_POLICIES, Shuffled.name))
        raise ValueError(f"unknown schedule policy {name!r}; allowed: {allowed}")
    return _POLICIES[name]()


class Queue:
    """The waiting requests of the whole cluster; attempts that resume come before all others, with
    `by_priority` those of their priority.
    """

    def __init__(self, policy: QueuePolicy, *, by_priority: bool = False) -> None:
        self.policy = policy
        self.by_priority = by_priority
        self.entries: OrderedDict[AttemptId, Waiting] = OrderedDict()
        self.fresh = 0  # those that count against the limit: resumed ones do not
        self.by_tenant: Counter[str] = Counter()
        self._number = 0
        self._since_oldest = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, attempt: object) -> bool:
        return attempt in self.entries

    def add(self, request: PlaceRequest, hashes: Sequence[int], now: float) -> Waiting:
        self._number += 1
        entry = Waiting(request, hashes, now, now + request.timeout_s, self._number)
        self.entries[request.attempt] = entry
        self.fresh += not request.resumed
        self.by_tenant[request.tenant] += 1
        return entry

    def remove(self, attempt: AttemptId) -> Waiting | None:
        entry = self.entries.pop(attempt, None)
        if entry is not None:
            self.fresh -= not entry.request.resumed
            self.by_tenant[entry.request.tenant] -= 1
            if not self.by_tenant[entry.request.tenant]:
                del self.by_tenant[entry.request.tenant]
        return entry

    def placed(self, entry: Waiting) -> None:
        """It was placed: the turn of the oldest comes nearer, or was this."""
        oldest = next(iter(self.entries.values()), None)
        was_oldest = oldest is None or entry.number < oldest.number
        self._since_oldest = 0 if was_oldest else self._since_oldest + 1

    def order(
        self, work: Mapping[str, int], running: Mapping[str, int], now: float
    ) -> tuple[list[Waiting], bool]:
        """Whom to place first, and whether nobody may overtake the first of them.

        `work` is placed tokens by tenant, `running` placed requests by routing key.
        """
        entries = list(self.entries.values())
        resumed = [entry for entry in entries if entry.request.resumed]
        fresh = [entry for entry in entries if not entry.request.resumed]
        ordered = self._fair(self.policy.order(fresh, running), work)
        oldest_turn = self._since_oldest >= OLDEST_EVERY - 1
        if self.by_priority:
            ordered = sorted(resumed + ordered, key=lambda entry: -entry.request.priority)
            oldest_turn = oldest_turn and now - entries[0].arrived >= PATIENCE_S
            return _first(entries[0], ordered) if oldest_turn else ordered, True
        if oldest_turn and fresh:
            ordered = _first(fresh[0], ordered)
        return resumed + ordered, bool(resumed) or (oldest_turn and bool(fresh))

    def _fair(self, ordered: list[Waiting], work: Mapping[str, int]) -> list[Waiting]:
        """Merges the tenants' orders: the next is always of the one with the least work."""
        if len(self.by_tenant) < 2:
            return ordered
        lines: dict[str, list[Waiting]] = {}
        for entry in ordered:
            lines.setdefault(entry.request.tenant, []).append(entry)
        heap = [(work.get(tenant, 0), number, tenant, 0) for number, tenant in enumerate(lines)]
        heapq.heapify(heap)
        merged: list[Waiting] = []
        while heap:
            load, number, tenant, at = heapq.heappop(heap)
            entry = lines[tenant][at]
            merged.append(entry)
            if at + 1 < len(lines[tenant]):
                heapq.heappush(heap, (load + entry.request.prompt_len, number, tenant, at + 1))
        return merged


def _first(entry: Waiting, ordered: list[Waiting]) -> list[Waiting]:
    return [entry, *(each for each in ordered if each is not entry)]


def expired(entries: Iterable[Waiting], now: float) -> list[Waiting]:
    return [entry for entry in entries if now >= entry.deadline]
