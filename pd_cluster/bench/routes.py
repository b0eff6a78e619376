"""The first token of a chat's next turn, by each of the three routes.

Only decode holds the last answer. By `remote` prefill computes it again, by `remote+pull` it reads
it from decode, by `local` decode computes the new message itself.
"""

from __future__ import annotations

import statistics

from pd_cluster.bench.client import Answer, generate, random_tokens, server, server_info
from pd_cluster.types import Route

PROMPT_TOKENS, ANSWER_TOKENS, NEXT_TOKENS = 400, 200, 30
ALLOWED: dict[Route, list[Route]] = {
    "remote": ["remote"],
    "remote+pull": ["remote", "remote+pull"],
    "local": ["remote", "local"],
}


def run(*, repeats: int = 5) -> dict[str, float]:
    """`routes.<route>.ttft_s`: medians of `repeats` conversations' second turns, each route in a
    cluster that may take it; `routes.<route>.ratio`: by that of `remote`; `.computed`: prompt
    tokens that were computed; `.taken`: the part of the turns that took this route.
    """
    figures: dict[str, float] = {}
    for route, allowed in ALLOWED.items():
        with server(None, placement="cost", routes=allowed) as url:
            turns = [_second_turn(url, route) for _ in range(repeats + 1)][1:]
        times = [turn.first_token_s for turn, _ in turns]
        computed = [turn.prompt_len - turn.cached for turn, _ in turns]
        figures[f"routes.{route}.ttft_s"] = statistics.median(times)
        figures[f"routes.{route}.computed"] = statistics.median(computed)
        figures[f"routes.{route}.taken"] = statistics.mean(taken for _, taken in turns)
    for route in ALLOWED:
        ratio = figures[f"routes.{route}.ttft_s"] / figures["routes.remote.ttft_s"]
        figures[f"routes.{route}.ratio"] = ratio
    return dict(sorted(figures.items()))


def _second_turn(url: str, route: Route) -> tuple[Answer, bool]:
    """The second turn, and whether it went by `route`."""
    prompt = random_tokens(PROMPT_TOKENS)
    first = generate(url, prompt, ANSWER_TOKENS)
    before = _taken(url, route)
    second = generate(url, [*prompt, *first.tokens, *random_tokens(NEXT_TOKENS)], 4)
    return second, _taken(url, route) > before


def _taken(url: str, route: Route) -> int:
    placements: dict[str, int] = server_info(url)["coordinator"]["placements"]
    return placements.get(route, 0)
