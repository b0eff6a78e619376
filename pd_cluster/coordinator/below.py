"""What of a prompt the workers of a fleet hold, in their pools and on the tiers below.

    tokens   [ held: in the pool │ in host memory │ in storage │ nowhere here ]
             0                 held             host         stored      prompt

A promotion reads up to `host`, or up to `stored` (by way of host memory), or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pd_cluster.coordinator.costs import Floats, Rates
from pd_cluster.coordinator.index import Lengths


class Held(NamedTuple):
    """One worker's part of a prompt: `below` tokens come up from lower tiers in `promote_s`."""

    held: int
    below: int
    promote_s: float


@dataclass(slots=True)
class Holdings:
    """By slot. `reach` is what will be held once what is worth it has come up, in `promote_s`
    seconds; `below` is each depth that a promotion could have and how long it would take.
    """

    held: Lengths
    reach: Lengths
    promote_s: Floats
    below: list[tuple[Lengths, Floats]]

    @property
    def most(self) -> Lengths:
        """What each could hold."""
        return self.below[-1][0] if self.below else self.held

    def choose(self, rest: Callable[[Lengths], Floats]) -> Floats:
        """Settles how much is promoted: what with the `rest` takes least. Returns that rest's
        seconds, by slot.
        """
        seconds = rest(self.held)
        for depth, read_s in self.below:
            others = rest(depth)
            better = read_s + others < self.promote_s + seconds
            self.reach = np.where(better, depth, self.reach)
            self.promote_s = np.where(better, read_s, self.promote_s)
            seconds = np.where(better, others, seconds)
        return seconds

    def at(self, slot: int) -> Held:
        """What was chosen for one worker."""
        held = int(self.held[slot])
        return Held(held, int(self.reach[slot]) - held, float(self.promote_s[slot]))

    def ways(self, slot: int) -> list[Held]:
        """All that can be chosen for one worker, with nothing promoted first."""
        held = int(self.held[slot])
        ways = [Held(held, 0, 0.0)]
        for depth, read_s in self.below:
            if depth[slot] > held + ways[-1].below:
                ways.append(Held(held, int(depth[slot]) - held, float(read_s[slot])))
        return ways

    def lies_below(self, slot: int) -> bool:
        """Whether lower tiers of the worker hold anything more."""
        return bool(self.most[slot] > self.held[slot])


def look_below(
    held: Lengths, below: tuple[Lengths, Lengths] | None, longest: int, rates: Rates
) -> Holdings:
    """`below` as `PrefixIndex.match_below` gives it; no more than `longest` tokens count."""
    depths: list[tuple[Lengths, Floats]] = []
    if below is not None:
        host, stored = (np.minimum(depth, longest) for depth in below)
        depths.append((host, rates.read_s("host", host - held)))
        if (stored > host).any():
            # Storage is read into host memory first.
            read_s = rates.read_s("storage", stored - host) + rates.read_s("host", stored - held)
            depths.append((stored, read_s))
    return Holdings(held, held, np.zeros(len(held)), depths)
