"""How many actors of each kind there shall be, pure: what to start, drain and end for it.

    starting ──► serving ◄──► draining ──► (gone)
        │ it could not start: the count falls back to what there is

A wish changes the counts; the next one takes its place, whatever the first has not reached yet. A
draining worker is given nothing new. It goes when nothing of it is used any more; what it still
runs after `grace_s` is tried again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from pd_cluster.errors import BadRequest, NotFound

Kind = Literal["prefill", "decode", "gateway"]
MemberState = Literal["starting", "serving", "draining"]

MOST = 64  # of a kind, as in the configuration
# What was told to give up its work gets this long (seconds) before it is ended all the same.
GIVE_UP_S = 15.0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    prefill: int
    decode: int
    gateway: int


class Wish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts to be reached, None for those that stay; or a worker to remove."""

    prefill: int | None = None
    decode: int | None = None
    gateway: int | None = None
    drain: str | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a wish was not taken: the HTTP status and message for who had it."""

    status: int
    message: str


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`counts` are wanted; `members` tells the state of each that there is.

    Gateways are members too. `wishes` is how many have been taken; `steady`: all is as wanted;
    `failure`: why less is wanted than was wished.
    """

    counts: Counts
    members: dict[str, MemberState]
    wishes: int
    steady: bool
    failure: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """From who looks after the actors to the coordinator: what there is, who gets no new work, and
    answers to wishes by their numbers, None where they were taken.
    """

    status: ScalingStatus
    draining: tuple[str, ...] = ()
    answers: dict[int, Refusal | None] = {}


class News(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's reply to an Order: `placed` counts the leases of each registered worker."""

    placed: dict[str, int]
    wishes: dict[int, Wish]


@dataclass(frozen=True)
class Launch:
    name: str
    kind: Kind


@dataclass(frozen=True)
class StopServing:
    """A gateway takes no new requests; those that it has may finish."""

    name: str


@dataclass(frozen=True)
class GiveUp:
    """A worker sends what it still runs away, to be tried again elsewhere."""

    name: str


@dataclass(frozen=True)
class End:
    name: str


Instruction = Launch | StopServing | GiveUp | End


def parse_counts(body: Any) -> Wish:
    """The wish of a request to scale. Raises BadRequest naming the field."""
    fields: dict[str, Kind] = {"prefill": "prefill", "decode": "decode", "gateways": "gateway"}
    if not isinstance(body, dict):
        raise BadRequest("expected an object with prefill, decode or gateways")
    for key in body:
        if key not in fields:
            raise BadRequest(f"unknown field {key!r}; expected {', '.join(fields)}", param=key)
    wanted = {key: value for key, value in body.items() if value is not None}
    if not wanted:
        raise BadRequest("at least one of prefill, decode and gateways is needed")
    for key, value in wanted.items():
        if type(value) is not int or not 1 <= value <= MOST:
            message = f"{key} must be a whole number from 1 to {MOST}, not {value!r}"
            raise BadRequest(message, param=key)
    return Wish(**{fields[key]: value for key, value in wanted.items()})


@dataclass(slots=True)
class Member:
    kind: Kind
    state: MemberState
    since: float
    leaving: bool = False  # it was asked for by name
    gave_up: bool = False


class Scaler:
    """Times are seconds of one clock. `objection` says why counts cannot be had, or None."""

    def __init__(
        self, counts: Counts, *, grace_s: float, objection: Callable[[Counts], str | None]
    ) -> None:
        self.counts = counts
        self.grace_s = grace_s
        self.members: dict[str, Member] = {
            f"{kind}-{index}": Member(kind, "serving", 0.0)
            for kind in get_args(Kind)
            for index in range(getattr(counts, kind))
        }
        self.failure = ""
        self._objection = objection
        self._wishes = 0

    # --- events ---

    def wish(self, wish: Wish) -> None:
        """Raises BadRequest or NotFound where it cannot be; then nothing has changed."""
        if wish.drain is not None:
            self._leave(wish.drain)
        else:
            fields = {kind: getattr(wish, kind) for kind in get_args(Kind)}
            changed = {kind: count for kind, count in fields.items() if count is not None}
            counts = msgspec.structs.replace(self.counts, **changed)
            complaint = self._objection(counts)
            if complaint is not None:
                raise BadRequest(complaint)
            self.counts = counts
        self.failure = ""
        self._wishes += 1

    def started(self, name: str, now: float) -> None:
        """It is warm, and can be given work."""
        member = self.members[name]
        if member.state == "starting":
            member.state, member.since = "serving", now

    def failed(self, name: str, why: str) -> None:
        """It could not start. No more of its kind are wanted than there are."""
        kind = self.members.pop(name).kind
        there = sum(each.state != "draining" for each in self._of(kind).values())
        self.counts = msgspec.structs.replace(self.counts, **{kind: max(1, there)})
        self.failure = f"{name} could not start: {why}"

    def gone(self, name: str) -> None:
        """A draining member's actor has ended."""
        del self.members[name]

    # --- decisions ---

    def plan(self, idle: Mapping[str, bool], now: float) -> list[Instruction]:
        """What to do now. `idle`: whether nothing of a draining member is used any more."""
        out: list[Instruction] = []
        for kind in get_args(Kind):
            out += self._fill(kind, now) + self._shrink(kind, now)
        for name, member in self.members.items():
            if member.state != "draining":
                continue
            waited = now - member.since
            if idle.get(name, False) or waited >= self.grace_s + GIVE_UP_S:
                out.append(End(name))
            elif waited >= self.grace_s and not member.gave_up and member.kind != "gateway":
                member.gave_up = True
                out.append(GiveUp(name))
        return out

    @property
    def draining(self) -> tuple[str, ...]:
        """The workers that get no new work."""
        return tuple(
            name
            for name, member in self.members.items()
            if member.state == "draining" and member.kind != "gateway"
        )

    @property
    def status(self) -> ScalingStatus:
        states = {name: member.state for name, member in self.members.items()}
        return ScalingStatus(
            counts=self.counts,
            members=states,
            wishes=self._wishes,
            steady=set(states.values()) == {"serving"}
            and all(len(self._of(kind)) == getattr(self.counts, kind) for kind in get_args(Kind)),
            failure=self.failure,
        )

    # --- within ---

    def _of(self, kind: Kind) -> dict[str, Member]:
        """In the order of their numbers."""
        mine = [(name, member) for name, member in self.members.items() if member.kind == kind]
        return dict(sorted(mine, key=lambda each: _number(each[0])))

    def _leave(self, name: str) -> None:
        member = self.members.get(name)
        if member is None or member.kind == "gateway":
            workers = [each for each, other in self.members.items() if other.kind != "gateway"]
            raise NotFound(f"no worker {name!r}; there are {', '.join(sorted(workers))}")
        if member.state == "draining" or member.leaving:
            return
        wanted = getattr(self.counts, member.kind) - 1
        if wanted < 1:
            raise BadRequest(
                f"{name} is the last {member.kind} worker: first start another, with `pd-cluster"
                f" scale --{member.kind} 2`"
            )
        member.leaving = True
        self.counts = msgspec.structs.replace(self.counts, **{member.kind: wanted})

    def _fill(self, kind: Kind, now: float) -> list[Instruction]:
        members = self._of(kind)
        missing = getattr(self.counts, kind) - sum(
            each.state != "draining" for each in members.values()
        )
        for member in members.values():
            # Still warm: better than a new one.
            spared = member.state == "draining" and not member.leaving and not member.gave_up
            if missing > 0 and spared and kind != "gateway":
                member.state, member.since = "serving", now
                missing -= 1
        out: list[Instruction] = []
        number = 0
        while missing > 0:
            name = f"{kind}-{number}"
            if name not in self.members:
                self.members[name] = Member(kind, "starting", now)
                out.append(Launch(name, kind))
                missing -= 1
            number += 1
        return out

    def _shrink(self, kind: Kind, now: float) -> list[Instruction]:
        staying = {name: each for name, each in self._of(kind).items() if each.state != "draining"}
        surplus = len(staying) - getattr(self.counts, kind)
        victims = sorted(
            staying.items(),
            key=lambda each: (not each[1].leaving, each[1].state == "serving", -_number(each[0])),
        )
        out: list[Instruction] = []
        serving = sum(each.state == "serving" for each in staying.values())
        for name, member in victims[: max(0, surplus)]:
            if member.state == "serving" and serving == 1:
                continue  # until another is warm
            serving -= member.state == "serving"
            member.state, member.since = "draining", now
            if kind == "gateway":
                out.append(StopServing(name))
        return out


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
