"""One attempt on a decode worker: its tokens, its pages, and what may become of it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_books import Promotion
from pd_cluster.states import Tracked, Transitions
from pd_cluster.types import AttemptId, IntArray, Route, StartAttempt, unpack_ints
from pd_cluster.worker.page_table import PageTable

SequenceState = Literal[
    "awaiting", "computing", "reserved", "landing", "running", "closing", "draining", "done"
]

SEQUENCE_TRANSITIONS: Transitions[SequenceState] = {
    ("awaiting", "computing"): "pages allocated, the tail is computed here",
    ("awaiting", "reserved"): "pages reserved, prefill asked",
    ("awaiting", "done"): "refused, cancelled or out of time",
    ("computing", "running"): "first token sampled here",
    ("computing", "done"): "ended with its first token, or early",
    ("reserved", "landing"): "first token is here, pages are not",
    ("reserved", "running"): "first token and all pages are here",
    ("reserved", "closing"): "ended with its first token, pages are not here",
    ("reserved", "draining"): "cancelled or failed while pages may land",
    ("reserved", "done"): "ended, and nothing can land any more",
    ("landing", "running"): "all pages are here",
    ("landing", "draining"): "cancelled or failed while pages may land",
    ("landing", "done"): "prefill worker failed or died",
    ("running", "done"): "finished, cancelled or retracted",
    ("closing", "draining"): "the pages did not come in time",
    ("closing", "done"): "all pages are here, or none can come any more",
    ("draining", "done"): "nothing can land any more",
}

# States in which a prefill worker may still write to, or read from, the sequence's pages.
RECEIVING: tuple[SequenceState, ...] = ("reserved", "landing", "closing", "draining")
# States in which it holds pages that a retraction would give back.
HOLDING: tuple[SequenceState, ...] = ("computing", "reserved", "landing", "running")


class Sequence(Tracked[SequenceState]):
    """One attempt. `tokens[:kv_len]` have their KV in the table's pages."""

    def __init__(self, request: StartAttempt, cache: PrefixCache, now: float) -> None:
        super().__init__(f"attempt {request.attempt}", "awaiting", SEQUENCE_TRANSITIONS, now)
        self.request = request
        start = unpack_ints(request.tokens)
        self._tokens = np.empty(len(start) + 64, np.int32)
        self._tokens[: len(start)] = start
        self.length = self.start_len = len(start)
        self.deadline = self.request_deadline = now + request.timeout_s
        self.awaits: AttemptId | None = None
        self.promotion: Promotion | None = None  # what of it comes up from lower tiers
        self.looked_below = False
        self.host_hit = self.disk_hit = 0  # of `resident`
        self.page_size = cache.page_size
        self.table = PageTable(cache)
        self.copies: list[tuple[int, int]] = []  # of pages, before its first row is computed
        self.resident = 0  # prompt tokens that were here when the pages were reserved
        self.in_flight: IntArray = np.empty(0, np.int32)  # pages that prefill may touch
        self.landed = np.empty(0, np.bool_)  # which pages of the reservation have been confirmed
        self.kv_len = 0
        self.outputs = 0  # that the gateway was sent
        self.ended = False  # the gateway has been told the outcome
        self.finished = False  # that was its last token

    @property
    def route(self) -> Route:
        """Where the prompt's logprobs are wanted all of it is computed, and prefill does that."""
        scored = self.request.params.prompt_logprobs >= 0
        return "remote" if scored else self.request.route

    @property
    def attempt(self) -> AttemptId:
        return self.request.attempt

    @property
    def tokens(self) -> IntArray:
        return self._tokens[: self.length]

    @property
    def start(self) -> IntArray:
        """What the attempt began with: the prompt, and the answer of earlier attempts."""
        return self._tokens[: self.start_len]

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return self.length - self.request.prompt_len

    def next_output(self) -> int:
        """The number of an output that is now sent."""
        self.outputs += 1
        return self.outputs - 1

    def append(self, token: int, count: int = 1) -> None:
        """Takes a token in, `count` times."""
        end = self.length + count
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, np.int32)])
        self._tokens[self.length : end] = token
        self.length = end
