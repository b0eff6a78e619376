"""Answers in the shapes of OpenAI's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pd_cluster.gateway.answer import Answer, Piece, Pieces, TotalUsage, total_usage
from pd_cluster.gateway.instructions import Usage
from pd_cluster.gateway.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_entries,
    prompt_logprobs,
)
from pd_cluster.gateway.sse import event
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import FinishReason, PromptScores, TokenLogprobs


class AnswerFormat:
    """How one route writes its answers: `per_prompt` choices of each prompt in a row.

    `prompt_logprobs` is how many of the likeliest tokens are told with each of the prompt's.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        per_prompt: int,
        with_logprobs: bool,
        prompts: Sequence[Sequence[int]],
        prompt_logprobs: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.prompt_logprobs = prompt_logprobs
        self.per_prompt = per_prompt
        self.with_logprobs = with_logprobs
        head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time())}
        self.head = {**head, "object": self.kind, "model": model}
        self.chunk_head = {**head, "object": self.chunk_kind, "model": model}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        usages = {index: each.usage for index, each in enumerate(answers) if each.usage}
        usage = usage_body(total_usage(usages, self.per_prompt))
        return {**self.head, "choices": choices, "usage": usage, **self.extra(answers)}

    def extra(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """What stands beside the choices."""
        return {}

    async def events(self, pieces: Pieces, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        extra: dict[str, Any] = {"usage": None} if include_usage else {}
        seen: set[int] = set()
        usages: dict[int, Usage] = {}
        async with aclosing(pieces):
            async for index, piece in pieces:
                for choice in self.deltas(index, piece, first=index not in seen):
                    yield event({**self.chunk_head, "choices": [choice], **extra})
                seen.add(index)
                if piece.finish_reason is not None:
                    usages[index] = piece.usage
        if include_usage:
            usage = usage_body(total_usage(usages, self.per_prompt))
            yield event({**self.chunk_head, "choices": [], "usage": usage})

    def prompt_of(self, index: int) -> Sequence[int]:
        return self.prompts[index // self.per_prompt]

    def scores(self, index: int, answer: Answer) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`, where they were asked for."""
        if self.prompt_logprobs is None or answer.prompt_scores is None:
            return {}
        prompt, top = self.prompt_of(index), self.prompt_logprobs
        shown = prompt_logprobs(self.tokenizer, prompt, answer.prompt_scores, top)
        return {"prompt_logprobs": shown}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The choices that a piece gives; each goes into a chunk of its own."""
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    """`echoes` are the prompts' texts, to be said before the answers; empty: none are. With them
    and logprobs go those of the prompts' tokens, with `top_logprobs` of the likeliest.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    echoes: Sequence[str] = ()
    top_logprobs = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text = self._echo(index) + answer.text
        choice = self._choice(
            index, text, answer.logprobs, answer.finish_reason, answer.prompt_scores
        )
        return {**choice, **self.scores(index, answer)}

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        if not (piece.text or piece.finish_reason or piece.logprobs or first):
            return []
        text = self._echo(index) + piece.text if first else piece.text
        reason, scores = piece.finish_reason, piece.prompt_scores
        return [self._choice(index, text, piece.logprobs, reason, scores)]

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
        scores: PromptScores | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            shape = self._logprobs.setdefault(index, CompletionLogprobs(self.tokenizer))
            if self.echoes and scores is not None:
                prompt = self.prompt_of(index)
                entries = [*prompt_entries(prompt, scores, self.top_logprobs), *entries]
                logprobs = shape.render(entries, prompt[0])
            else:
                logprobs = shape.render(entries)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.per_prompt] if self.echoes else ""


class ChatFormat(AnswerFormat):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def extra(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self.scores(0, answers[0])

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        choices = []
        if first:
            choices.append(self._delta(index, {"role": "assistant", "content": ""}))
        if piece.text or piece.logprobs:
            logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
            choices.append(self._delta(index, {"content": piece.text}, logprobs=logprobs))
        if piece.finish_reason is not None:
            choices.append(self._delta(index, {}, piece.finish_reason))
        return choices

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, entries) if self.with_logprobs else None

    def _delta(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def usage_body(usage: TotalUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
