"""State machines that remember how they got where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from pd_cluster.errors import InvalidTransition

S = TypeVar("S", bound=str)

Transitions = Mapping[tuple[S, S], str]
"""(start, finish) to what the move means. A move that is not there is a bug."""


class Tracked(Generic[S]):
    """A state, moved only along its transition table, with the story of its moves.

    The story is a list of (now, state, why); `now` is in seconds of the owner's clock.
    """

    __slots__ = ("state", "story", "transitions", "who")

    def __init__(self, who: str, state: S, transitions: Transitions[S], now: float) -> None:
        self.who = who
        self.transitions = transitions
        self.state: S = state
        self.story: list[tuple[float, str, str]] = [(now, state, "start")]

    def move(self, to: S, now: float, why: str = "") -> None:
        """Raises InvalidTransition, with the story, if the table has no such move."""
        meaning = self.transitions.get((self.state, to))
        if meaning is None:
            raise InvalidTransition(self.who, self.state, to, self.story)
        self.story.append((now, to, why or meaning))
        self.state = to
