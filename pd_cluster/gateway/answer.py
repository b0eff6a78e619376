"""Answers as text: runs requests on the backend and joins tokens, text and stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import structs

from pd_cluster.gateway.backend import Backend, GenerateRequest
from pd_cluster.gateway.http import stop_tasks
from pd_cluster.gateway.instructions import Usage
from pd_cluster.gateway.text import TextStream
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import FinishReason


@dataclass(frozen=True)
class Piece:
    """What came next; the last piece has a `finish_reason`.

    `matched` is the stop string that was found.
    """

    text: str
    tokens: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    matched: str | None = None


async def stream_pieces(
    backend: Backend, tokenizer: Tokenizer, request: GenerateRequest, stops: Sequence[str]
) -> AsyncGenerator[Piece, None]:
    """Close it (`aclosing`): that stops the request on the workers."""
    text = TextStream(tokenizer, stops, request.end_token_ids)
    given = 0
    async with backend.generate(request) as generation:
        async for generated in generation:
            new, reason = text.feed(generated.tokens), generated.finish_reason
            if reason is not None:
                new += text.flush()
            if text.matched is not None:
                reason = "stop"
                generation.stop()
            # The workers may be ahead of us: only what was read counts.
            given += len(generated.tokens)
            usage = structs.replace(generation.usage, completion_tokens=given)
            yield Piece(new, generated.tokens, usage, reason, text.matched)
            if reason is not None:
                return


async def stream_all(
    backend: Backend,
    tokenizer: Tokenizer,
    requests: Sequence[GenerateRequest],
    stops: Sequence[str],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of several requests as they come, with the request's index."""
    if len(requests) == 1:
        # The usual case goes without a task and a queue of its own.
        async with aclosing(stream_pieces(backend, tokenizer, requests[0], stops)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    results: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def run(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(stream_pieces(backend, tokenizer, request, stops)) as pieces:
                async for piece in pieces:
                    results.put_nowait((index, piece))
        except Exception as error:
            results.put_nowait((index, error))

    tasks = [asyncio.create_task(run(index, request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            index, result = await results.get()
            if isinstance(result, Exception):
                raise result
            running -= result.finish_reason is not None
            yield index, result
    finally:
        await stop_tasks(*tasks)


@dataclass
class Answer:
    """A whole answer, or what there is of it yet."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    matched: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.usage = piece.usage
        self.finish_reason = piece.finish_reason
        self.matched = piece.matched


async def collect_all(
    backend: Backend,
    tokenizer: Tokenizer,
    requests: Sequence[GenerateRequest],
    stops: Sequence[str],
) -> list[Answer]:
    """The whole answers; the first request that fails ends all."""
    answers = [Answer() for _ in requests]
    async with aclosing(stream_all(backend, tokenizer, requests, stops)) as pieces:
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers
