"""Where operators' wishes to scale wait for the process that starts and ends actors.

That process (`serve`) keeps the counts, and tells what there is with every question; so a
coordinator that restarts has lost nothing but wishes that nobody has answered yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from pd_cluster.scaling import News, Order, Refusal, ScalingStatus, Wish

Answer = Callable[[ScalingStatus | Refusal], None]


class Wishes:
    """Each wish is handed over once, in the order in which they came."""

    def __init__(self) -> None:
        self.status: ScalingStatus | None = None
        self._number = 0
        self._new: OrderedDict[int, Wish] = OrderedDict()
        self._answers: dict[int, Answer] = {}

    def add(self, wish: Wish, answer: Answer) -> None:
        self._number += 1
        self._new[self._number] = wish
        self._answers[self._number] = answer

    def order(self, order: Order, placed: Mapping[str, int]) -> News:
        self.status = order.status
        for number, refusal in order.answers.items():
            # One that was not handed over yet is meant by no answer: this one is to a wish of
            # before a restart.
            if number in self._answers and number not in self._new:
                self._answers.pop(number)(order.status if refusal is None else refusal)
        new, self._new = dict(self._new), OrderedDict()
        return News(placed=dict(placed), wishes=new)
