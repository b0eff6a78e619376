"""The text of one answer as it is sent: whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pd_cluster.model.tokenizer import IncrementalDetokenizer, Tokenizer


class TextStream:
    """Tokens in, text to send out.

    Text that may be the beginning of a stop string is held back until it is known not to be. A
    token of `end_token_ids` ends the sequence and has no text. `matched` is the stop string that
    was found.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], end_token_ids: Collection[int]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = tuple(stops)
        self._end_token_ids = end_token_ids
        self._held = ""
        self.matched: str | None = None

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that can be sent after these tokens; none once a stop string was found."""
        if self.matched is not None:
            return ""
        if tokens and tokens[-1] in self._end_token_ids:
            tokens = tokens[:-1]
        return self._filter(self._detokenizer.feed(tokens))

    def flush(self) -> str:
        """What was held back, at the end of the tokens."""
        if self.matched is not None:
            return ""
        text = self._filter(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _filter(self, new: str) -> str:
        if not self._stops or not new:
            return new
        text = self._held + new
        found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
