"""Logprobs in the shapes of the APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

from pd_cluster.draw import unpack_scores
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import PromptScores, TokenLogprobs

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

    def render(self, entries: Sequence[TokenLogprobs], first: int | None = None) -> dict[str, Any]:
        """`first` is a prompt's first token, which nothing stands before: its logprobs are null."""
        ids = [*(() if first is None else (first,)), *(each.token for each in entries)]
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        shown = [None] * (first is not None)
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [*shown, *(max(each.logprob, LOWEST) for each in entries)],
            "top_logprobs": [*shown, *(self._top(each) for each in entries)],
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


def prompt_entries(
    prompt: Sequence[int], packed: PromptScores, top: int | None = None
) -> list[TokenLogprobs]:
    """Those of a prompt's tokens from the second on, with the `top` likeliest, or all there are."""
    scores = unpack_scores(packed)
    top_ids, top_logprobs = scores.top_ids[:, :top], scores.top_logprobs[:, :top]
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, logprobs, strict=True)))
        for token, logprob, ids, logprobs in zip(
            prompt[1:],
            scores.logprobs.tolist(),
            top_ids.tolist(),
            top_logprobs.tolist(),
            strict=True,
        )
    ]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], packed: PromptScores, top: int
) -> list[dict[str, Any] | None]:
    """vLLM's: for each token the likeliest ones by id, its own among them; null for the first."""

    def shown(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}

    ranks = unpack_scores(packed).ranks.tolist()
    shapes: list[dict[str, Any] | None] = [None]
    for each, rank in zip(prompt_entries(prompt, packed, top), ranks, strict=True):
        mine = {str(each.token): shown(each.token, each.logprob, rank)}
        likeliest = enumerate(each.top, 1)
        others = {str(token): shown(token, logprob, at) for at, (token, logprob) in likeliest}
        shapes.append({**mine, **others, **mine})
    return shapes


def native_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs],
    *,
    texts: bool,
    top: bool,
    side: Literal["input", "output"] = "output",
    unscored: Sequence[int] = (),
) -> dict[str, Any]:
    """SGLang's `meta_info`: (logprob, token id, text or null) a token, null for the `unscored`
    ones before the others.
    """

    def shown(token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = tokenizer.token_bytes(token).decode(errors="replace") if texts else None
        return None if logprob is None else max(logprob, LOWEST), token, text

    shapes: dict[str, Any] = {
        f"{side}_token_logprobs": [
            *(shown(token, None) for token in unscored),
            *(shown(each.token, each.logprob) for each in entries),
        ]
    }
    if top:
        shapes[f"{side}_top_logprobs"] = [
            *(None for _ in unscored),
            *([shown(*pair) for pair in each.top] for each in entries),
        ]
    return shapes
