"""The first token of a chat's next turn, by each of the three routes.

Only decode holds the last answer. By `remote` prefill computes it again, by `remote+pull` it reads
it from decode, by `local` decode computes the new message itself.
"""

from __future__ import annotations

import json
import secrets
import statistics
import time
from typing import NamedTuple

import numpy as np

from pd_cluster.bench.prefix import request, server
from pd_cluster.types import Route

PROMPT_TOKENS, ANSWER_TOKENS, NEXT_TOKENS = 400, 200, 30
ALLOWED: dict[Route, list[Route]] = {
    "remote": ["remote"],
    "remote+pull": ["remote", "remote+pull"],
    "local": ["remote", "local"],
}
# Low ids exist in every vocabulary; the first are control tokens in most.
_TOKEN_IDS = (256, 8192)


class _Turn(NamedTuple):
    first_token_s: float
    tokens: list[int]
    computed: int


def run(*, repeats: int = 5) -> dict[str, float]:
    """`routes.<route>.ttft_s`: medians of `repeats` conversations' second turns, each route in a
    cluster that may take it; `routes.<route>.ratio`: by that of `remote`; `.computed`: prompt
    tokens that were computed; `.taken`: the part of the turns that took this route.
    """
    figures: dict[str, float] = {}
    for route, allowed in ALLOWED.items():
        with server(None, placement="cost", routes=allowed) as url:
            turns = [_second_turn(url, route) for _ in range(repeats + 1)][1:]
        figures[f"routes.{route}.ttft_s"] = statistics.median(
            turn.first_token_s for turn, _ in turns
        )
        figures[f"routes.{route}.computed"] = statistics.median(turn.computed for turn, _ in turns)
        figures[f"routes.{route}.taken"] = statistics.mean(taken for _, taken in turns)
    for route in ALLOWED:
        ratio = figures[f"routes.{route}.ttft_s"] / figures["routes.remote.ttft_s"]
        figures[f"routes.{route}.ratio"] = ratio
    return dict(sorted(figures.items()))


def _second_turn(url: str, route: Route) -> tuple[_Turn, bool]:
    """The second turn, and whether it went by `route`."""
    rng = np.random.default_rng(secrets.randbits(64))
    prompt: list[int] = rng.integers(*_TOKEN_IDS, PROMPT_TOKENS).tolist()
    first = _ask(url, prompt, ANSWER_TOKENS)
    message: list[int] = rng.integers(*_TOKEN_IDS, NEXT_TOKENS).tolist()
    before = _taken(url, route)
    second = _ask(url, [*first.tokens, *message], 4)
    return second, _taken(url, route) > before


def _ask(url: str, prompt: list[int], new_tokens: int) -> _Turn:
    """All tokens of the turn: its prompt and its answer."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "stream": True, "sampling_params": sampling})
    start, first_token_s, cached = time.perf_counter(), 0.0, 0
    answer: list[int] = []
    with request(url, "POST", "/generate", body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                answer, cached = event["output_ids"], event["meta_info"]["cached_tokens"]
                first_token_s = first_token_s or time.perf_counter() - start
    return _Turn(first_token_s, [*prompt, *answer], len(prompt) - cached)


def _taken(url: str, route: Route) -> int:
    with request(url, "GET", "/server_info") as response:
        placements: dict[str, int] = json.load(response)["coordinator"]["placements"]
    return placements.get(route, 0)
