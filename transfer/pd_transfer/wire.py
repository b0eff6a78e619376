"""What carries the bulk data of one peer, by messages that both sides plan alike.

A transfer is a `Sending` on one side and a `Receiving` on the other, each with the plan that
runs.py makes of the runs' lengths. ucx_wire.py and tcp_wire.py are the two wires.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pd_transfer.regions import Vector
from pd_transfer.runs import HOST_MEMORY, Memory, Message, Packing, plan

# A message is named by its transfer's id and its place in the plan, of this many bits.
INDEX_BITS: Final = 24


@dataclass(eq=False)
class Sending:
    """`plan[:next]` has been handed to the wire, of which `in_flight` are not done.

    Only UCX can be given other `memory` than the host's.
    """

    id: int
    addresses: Vector
    lengths: Vector
    packing: Packing
    on_idle: Callable[[], None]
    memory: Memory = HOST_MEMORY
    next: int = 0
    in_flight: int = 0
    stopped: bool = False
    plan: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan(self.lengths, self.packing)
        assert len(self.plan) < 1 << INDEX_BITS

    @property
    def finished(self) -> bool:
        return self.stopped or self.next == len(self.plan)

    @property
    def idle(self) -> bool:
        return self.finished and not self.in_flight


@dataclass(eq=False)
class Receiving:
    """As `Sending`. `limit` is how many messages will come, None while that is not known.

    With `discard` they are taken off the wire and thrown away, each at most OWN_MESSAGE bytes. What
    is to be thrown away from the start has no plan: how much it would be is but the peer's word.
    """

    id: int
    addresses: Vector
    lengths: Vector
    packing: Packing
    on_done: Callable[[], None]
    memory: Memory = HOST_MEMORY
    limit: int | None = None
    discard: bool = False
    next: int = 0
    in_flight: int = 0
    plan: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = [] if self.discard else plan(self.lengths, self.packing)
        assert len(self.plan) < 1 << INDEX_BITS
        if not self.discard:
            self.limit = len(self.plan)

    @property
    def finished(self) -> bool:
        return self.limit is not None and self.next >= self.limit

    @property
    def done(self) -> bool:
        return self.finished and not self.in_flight


class Wire(ABC):
    """In the loop's thread only. A job's end may be told within the call that starts it."""

    packing: Packing
    """Of the jobs that it takes."""

    @abstractmethod
    def send(self, job: Sending) -> None: ...

    @abstractmethod
    def receive(self, job: Receiving) -> None: ...

    @abstractmethod
    def stop_sending(self, job: Sending) -> None:
        """Send no message of it that has not begun.

        `on_idle` is called once the rest has left, unless it has been already.
        """

    @abstractmethod
    def stop_receiving(self, job: Receiving, limit: int) -> None:
        """Only `limit` messages of it will ever be sent; throw those away that are still to come.

        `on_done` is called when the last of them has been taken, unless it has been already.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Nothing lands or leaves after this. Jobs under way end without being called back."""
