"""The text of one answer as it is sent: whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pd_cluster.model.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a request wants its text.

    `stops` are looked for once `min_tokens` tokens are there, in the text that follows.
    `include_stop` keeps the stop string, or the text of the token that ended the sequence.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class TextStream:
    """Tokens in, text to send out.

    Text that may be the beginning of a stop string is held back until it is known not to be. A
    token of `end_token_ids` ends the sequence and has no text. `matched` is the stop string that
    was found.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, end_token_ids: Collection[int]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens
        )
        self._options = options
        self._end_token_ids = end_token_ids
        self._count = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that can be sent after these tokens; none once a stop string was found."""
        if self.matched is not None:
            return ""
        # Those before the last of `min_tokens` cannot end the answer.
        free = max(0, min(len(tokens), self._options.min_tokens - 1 - self._count))
        self._count += len(tokens)
        whole = self._detokenizer.feed(tokens[:free])
        rest = tokens[free:]
        if rest and rest[-1] in self._end_token_ids and not self._options.include_stop:
            rest = rest[:-1]
        return whole + self._filter(self._detokenizer.feed(rest))

    def flush(self) -> str:
        """What was held back, at the end of the tokens."""
        if self.matched is not None:
            return ""
        text = self._filter(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _filter(self, new: str) -> str:
        stops = self._options.stops
        if not stops or not new:
            return new
        text = self._held + new
        found = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[: at + len(self.matched)] if self._options.include_stop else text[:at]
        keep = max(_overlap(text, stop) for stop in stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
