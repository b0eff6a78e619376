"""Logprobs in the shapes of the APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import TokenLogprobs

# JSON has no infinity; OpenAI's and vLLM's answers go no lower.
LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """OpenAI's chat: `bytes` tells what `token` cannot where a character is cut."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = [
        {
            **shown(each.token, each.logprob),
            "top_logprobs": [shown(token, logprob) for token, logprob in each.top],
        }
        for each in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """OpenAI's completions, for one choice: offsets go on from chunk to chunk.

    A token that is part of a character only reads `bytes:\\xe2\\x98`. The chosen token is among
    the top ones, of which there may so be one more than was asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for each in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(each.token)))
        return {
            "tokens": [self._text(each.token) for each in entries],
            "token_logprobs": [max(each.logprob, LOWEST) for each in entries],
            "top_logprobs": [self._top(each) for each in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            # Of tokens that read alike the likeliest stays.
            top.setdefault(self._text(token), max(logprob, LOWEST))
        return top

    def _text(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def native_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, texts: bool, top: bool
) -> dict[str, Any]:
    """SGLang's `meta_info`: (logprob, token id, text or null) a token."""

    def shown(token: int, logprob: float) -> tuple[float, int, str | None]:
        text = tokenizer.token_bytes(token).decode(errors="replace") if texts else None
        return max(logprob, LOWEST), token, text

    shapes: dict[str, Any] = {
        "output_token_logprobs": [shown(each.token, each.logprob) for each in entries]
    }
    if top:
        shapes["output_top_logprobs"] = [[shown(*pair) for pair in each.top] for each in entries]
    return shapes
