"""What a shared prefix saves: time to first token and bytes moved, of a first request and of a
second that shares all of its prompt but the end.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from pd_cluster.bench.client import generate, kv_bytes, random_tokens, server, server_info

SHARED_TOKENS = 1500
OWN_TOKENS = 32
_NEW_TOKENS = 4


class _Answered(NamedTuple):
    first_token_s: float
    moved_bytes: int
    avoided_bytes: int


def run(url: str | None = None, *, repeats: int = 5) -> dict[str, float]:
    """`prefix.ttft_first_s` and `prefix.ttft_second_s`, medians of `repeats` fresh prefixes.

    `prefix.ttft_ratio` is the median of second by first; `prefix.bytes_first`,
    `prefix.bytes_second` and `prefix.avoided_bytes_second` are the KV that each had moved or, being
    there already, did not have to move. Asks the server at `url`, else a cluster of its own with
    the embedded defaults. Raises StartError where there is no server or it refuses.
    """
    with server(url) as address:
        firsts, seconds = [], []
        # The first pair warms up whatever is made at first use.
        for repeat in range(repeats + 1):
            first, second = _pair(address)
            if repeat:
                firsts.append(first)
                seconds.append(second)
    pairs = zip(firsts, seconds, strict=True)
    return {
        "prefix.ttft_first_s": statistics.median(each.first_token_s for each in firsts),
        "prefix.ttft_second_s": statistics.median(each.first_token_s for each in seconds),
        "prefix.ttft_ratio": statistics.median(b.first_token_s / a.first_token_s for a, b in pairs),
        "prefix.bytes_first": statistics.median(each.moved_bytes for each in firsts),
        "prefix.bytes_second": statistics.median(each.moved_bytes for each in seconds),
        "prefix.avoided_bytes_second": statistics.median(each.avoided_bytes for each in seconds),
    }


def conclusions(figures: dict[str, float]) -> list[str]:
    """What the figures of `run` say, in sentences."""
    ratio = figures["prefix.ttft_ratio"]
    moved = figures["prefix.bytes_second"] / max(1.0, figures["prefix.bytes_first"])
    aim = "as aimed for" if ratio < 0.25 else "above the aim"
    return [
        f"with {SHARED_TOKENS} tokens shared, the first token comes after {ratio:.3f} of the time"
        f" ({aim}: under 0.25), and {moved:.1%} of the bytes move"
    ]


def _pair(url: str) -> tuple[_Answered, _Answered]:
    shared = random_tokens(SHARED_TOKENS)
    first, second = (_ask(url, shared + random_tokens(OWN_TOKENS)) for _ in range(2))
    return first, second


def _ask(url: str, prompt: list[int]) -> _Answered:
    moved, avoided = kv_bytes(server_info(url))
    answer = generate(url, prompt, _NEW_TOKENS)
    moved_then, avoided_then = kv_bytes(server_info(url))
    return _Answered(answer.first_token_s, moved_then - moved, avoided_then - avoided)
