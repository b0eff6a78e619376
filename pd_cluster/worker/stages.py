"""How long an attempt was in each stage that its decode worker sees, read off its story."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pd_cluster.observability.snapshots import LATENCY_BUCKETS, Histogram

Stage = Literal["reserve", "prefill", "transfer", "decode"]
STAGES: tuple[Stage, ...] = ("reserve", "prefill", "transfer", "decode")


class StageTimes:
    """Histograms of the stages that were passed, whatever became of the attempt then."""

    def __init__(self) -> None:
        self.histograms = {stage: Histogram(LATENCY_BUCKETS) for stage in STAGES}

    def take(self, story: Sequence[tuple[float, str, str]], *, finished: bool) -> None:
        """The story of an attempt that is over."""
        for stage, seconds in stages_of(story, finished=finished):
            self.histograms[stage].observe(seconds)


def stages_of(
    story: Sequence[tuple[float, str, str]], *, finished: bool
) -> Iterator[tuple[Stage, float]]:
    """(stage, seconds): `reserve` until prefill is asked, `prefill` until the first token,
    `transfer` until the last page (nothing where that came before the token), `decode` until the
    end. With `finished` the attempt gave its last token.
    """
    for (since, state, _), (until, after, _) in pairwise(story):
        seconds = until - since
        match state, after:
            case "awaiting", "computing" | "reserved":
                yield "reserve", seconds
            case "computing", "running":
                yield "prefill", seconds
            case "reserved", "landing" | "closing":
                yield "prefill", seconds
            case "reserved", "running":
                yield "prefill", seconds
                yield "transfer", 0.0
            case "computing" | "reserved", "done" if finished:
                yield "prefill", seconds
            case "landing" | "closing", "running" | "done":
                yield "transfer", seconds
            case "running", _:
                yield "decode", seconds
