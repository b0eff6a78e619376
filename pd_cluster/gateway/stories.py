"""What became of requests: the stories of those under way, and of recent ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from pd_cluster.gateway.request import RequestState

# Of a story with very many moves the first and the last are kept.
MAX_MOVES = 256


def sequence_id(request_id: str, index: int) -> str:
    """The id of a request's sequence, on every worker and in every log."""
    return f"{request_id}.{index}"


def request_of(sequence: str) -> str:
    return sequence.rpartition(".")[0] or sequence


class Stories:
    """The last `capacity` sequences that ended, without their prompts and answers."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def keep(self, state: RequestState) -> None:
        self._ended[state.request_id] = _story(state)
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def find(
        self, request_id: str, running: Iterable[RequestState], now: float
    ) -> list[dict[str, Any]]:
        """By the id of a request or of one of its sequences; `ago_s` counts back from `now`."""
        found = [each for key, each in self._ended.items() if _is_of(key, request_id)]
        found += [_story(each) for each in running if _is_of(each.request_id, request_id)]
        found.sort(key=lambda each: (len(each["id"]), each["id"]))
        return [
            {**each, "story": [{"ago_s": now - at, **move} for at, move in each["story"]]}
            for each in found
        ]


def _is_of(sequence: str, request_id: str) -> bool:
    """Also by the client's own id, which ours begins with."""
    request = request_of(sequence)
    return request_id in (sequence, request, request.rpartition("-")[0])


def _story(state: RequestState) -> dict[str, Any]:
    moves = [(at, {"state": to, "why": why}) for at, to, why in state.story]
    if len(moves) > MAX_MOVES:
        moves = moves[: MAX_MOVES // 2] + moves[-MAX_MOVES // 2 :]
    return {
        "id": state.request_id,
        "state": state.state,
        "attempts": state.attempt.number,
        "failures": state.failures,
        "prompt_tokens": state.usage.prompt_tokens,
        "completion_tokens": state.usage.completion_tokens,
        "cached_tokens": state.usage.cached_tokens,
        "story": moves,
    }
