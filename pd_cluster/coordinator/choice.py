"""What is asked of a placement policy, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.types import Route

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of each kind counts beside a second of computing.

    Queueing counts less than its length, for waiting delays one request, once, while computing
    what another worker holds costs the cluster capacity and cache; `balance` keeps the work of the
    last minutes even, and with it the ages at which caches evict.
    """

    queue: float = 0.1
    balance: float = 0.01
    decode_balance: float = 0.01
    # What a decode step takes above an empty one counts for this many tokens of the answer, times
    # its ratio to the empty step to the power of `itl_power`: the tail is what hurts.
    itl_tokens: float = 300.0
    itl_power: float = 5.0
    # No request is bound to a prefill worker that has more than this to do: seconds, or what with
    # the request makes a step of so many prompt tokens, whichever is more.
    bind_ahead_s: float = 0.25
    bind_ahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Which routes beside `remote` the workers can do, and how far `local` may go."""

    pull: bool = False
    local: bool = False
    # Running streams' inter-token time must stay under this, and a tail under this many steps.
    itl_limit_s: float = 0.05
    local_max_steps: int = 4
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed. `avoid`: decode slots to be taken only if there is no other."""

    prompt_len: int
    max_tokens: int
    hashes: Sequence[int] = ()
    avoid: frozenset[int] = frozenset()
    # Its own pledge: (slot, seconds) counted in `Fleet.pledged`, not to be queued behind.
    pledge: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One candidate's cost and what it is made of, in seconds.

    `held` tokens are in its pool, `below` more would come up from its lower tiers.
    """

    slot: int
    cost: float
    held: int
    terms: dict[str, float]
    below: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` is a slot also for `local`: the worker that serves if decode then refuses."""

    prefill: int
    decode: int
    route: Route = "remote"
    prefill_s: float = 0.0  # work given to the prefill worker
    decode_s: float = 0.0  # work given to the decode worker: what it receives, or computes
    prefill_held: int = 0
    decode_held: int = 0
    prefill_below: int = 0
    decode_below: int = 0
    promote: bool = True  # False: decode shall have sent what lies on its lower tiers
    reasons: dict[str, list[Term]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Later:
    """The best prefill worker has enough to do until `until`; ask again then."""

    prefill: int
    prefill_s: float
    until: float


class PlacementPolicy(ABC):
    """Chooses among ready prefill workers and the decode workers in `eligible` (both not empty)."""

    name: str
    limits = RouteLimits()  # set anew when workers come and go

    @abstractmethod
    def choose(
        self,
        ask: Ask,
        prefill: Fleet,
        decode: Fleet,
        eligible: Mask,
        now: float,
    ) -> Choice | Later: ...


def not_avoided(eligible: Mask, ask: Ask) -> Mask:
    """Without those that are to be avoided, where that leaves any."""
    if not ask.avoid:
        return eligible
    wanted = eligible.copy()
    wanted[list(ask.avoid)] = False
    return wanted if wanted.any() else eligible
