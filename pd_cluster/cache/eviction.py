"""Which unlocked leaf is evicted next.

A policy only scores: the lowest score goes first, ties go to the least recently used. How much is
evicted is not its business, and no score keeps a node for good.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from typing import TypeAlias

from pd_cluster.cache.node import Node

_Entry: TypeAlias = tuple[float, float, int, int, Node]


class EvictionPolicy(ABC):
    """A constructor's keyword parameters are the policy's configuration, all of them integers."""

    name: str

    @abstractmethod
    def score(self, node: Node) -> float:
        """How much the node is worth keeping."""


class Lru(EvictionPolicy):
    """The least recently used first."""

    name = "lru"

    def score(self, node: Node) -> float:
        return 0.0


class Lfu(EvictionPolicy):
    """The one with the fewest hits first."""

    name = "lfu"

    def score(self, node: Node) -> float:
        return node.hit_count


class Slru(EvictionPolicy):
    """All that were hit less than `protected_threshold` times before all others."""

    name = "slru"

    def __init__(self, *, protected_threshold: int = 2) -> None:
        if protected_threshold < 1:
            raise ValueError(
                "protected_threshold of eviction policy 'slru' must be at least 1, "
                f"not {protected_threshold}"
            )
        self.protected_threshold = protected_threshold

    def score(self, node: Node) -> float:
        return 1.0 if node.hit_count >= self.protected_threshold else 0.0


class Priority(EvictionPolicy):
    """The one published with the lowest priority first; of several, a node keeps the highest."""

    name = "priority"

    def score(self, node: Node) -> float:
        return node.priority


class Fifo(EvictionPolicy):
    """The oldest first."""

    name = "fifo"

    def score(self, node: Node) -> float:
        return node.created


class Mru(EvictionPolicy):
    """The most recently used first."""

    name = "mru"

    def score(self, node: Node) -> float:
        return -node.last_access


class Filo(EvictionPolicy):
    """The youngest first."""

    name = "filo"

    def score(self, node: Node) -> float:
        return -node.created


_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Lfu, Slru, Priority, Fifo, Mru, Filo)
}


def make_eviction_policy(name: str, config: Mapping[str, object]) -> EvictionPolicy:
    """The policy of that name.

    Raises:
        ValueError: no such policy, or it has no such key, or a value is not an integer or too
            small; the message names the policy, the key and what is allowed.
    """
    if name not in _POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; allowed: {', '.join(_POLICIES)}")
    policy = _POLICIES[name]
    allowed = [p.name for p in signature(policy).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key, value in config.items():
        if key not in allowed:
            raise ValueError(
                f"eviction policy {name!r} has no key {key!r}; "
                f"allowed: {', '.join(allowed) or 'none'}"
            )
        if type(value) is not int:
            raise ValueError(f"{key} of eviction policy {name!r} must be an integer, not {value!r}")
    return policy(**config)


class EvictionQueue:
    """Unlocked leaves, the next to be evicted first.

    A heap whose entries are not taken out when their node is locked or touched or gets a child:
    the node's stamp moves on, and the entry is dropped when it comes up. So each operation costs
    O(log n), never a look at all leaves.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.visits = 0  # entries ever looked at in search of the next
        self._heap: list[_Entry] = []
        self._size = 0
        self._stamp = 0

    def __len__(self) -> int:
        return self._size

    def offer(self, node: Node) -> None:
        """The node has become an unlocked leaf, or is one and its score may have changed."""
        if not node.stamp:
            self._size += 1
        self._stamp += 1
        node.stamp = self._stamp
        heapq.heappush(
            self._heap,
            (self.policy.score(node), node.last_access, node.tick, self._stamp, node),
        )
        if len(self._heap) > 2 * self._size + 64:
            self.compact()

    def withdraw(self, node: Node) -> None:
        """The node is no longer an unlocked leaf, if it was one."""
        if node.stamp:
            node.stamp = 0
            self._size -= 1

    def pop(self) -> Node:
        """Take out the next to be evicted. There must be one."""
        while True:
            entry = heapq.heappop(self._heap)
            self.visits += 1
            node = entry[4]
            if node.stamp == entry[3]:
                node.stamp = 0
                self._size -= 1
                return node

    def nodes(self) -> list[Node]:
        """All candidates, in no order; O(n)."""
        return [entry[4] for entry in self._heap if entry[3] == entry[4].stamp]

    def compact(self) -> None:
        """Drop the entries that are no longer valid, and with them their nodes; O(n)."""
        self._heap = [entry for entry in self._heap if entry[3] == entry[4].stamp]
        heapq.heapify(self._heap)
