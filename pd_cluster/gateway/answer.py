"""Answers as text: runs requests on the backend and joins tokens, text and stop strings."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec import structs

from pd_cluster.gateway.backend import Backend, GenerateRequest
from pd_cluster.gateway.instructions import Usage
from pd_cluster.gateway.tasks import stop_tasks
from pd_cluster.gateway.text import TextOptions, TextStream
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import FinishReason, PromptScores, TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What came next; the last piece has a `finish_reason`.

    `matched` is the stop string that was found. `logprobs` has one entry a token where they were
    asked for; the text of these tokens may still be held back. `prompt_scores` come with the first
    piece.
    """

    text: str
    tokens: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    matched: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_scores: PromptScores | None = None


Pieces = AsyncGenerator[tuple[int, Piece], None]


async def stream_pieces(
    backend: Backend, tokenizer: Tokenizer, request: GenerateRequest, options: TextOptions
) -> AsyncGenerator[Piece, None]:
    """Close it (`aclosing`): that stops the request on the workers."""
    if request.prompt_only:
        yield await _prompt_piece(backend, request)
        return
    text = TextStream(tokenizer, options, request.end_token_ids)
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
            tokens, logprobs = generated.tokens, generated.logprobs
            scores = generated.prompt_scores
            yield Piece(new, tokens, usage, reason, text.matched, logprobs, scores)
            if reason is not None:
                return


async def _prompt_piece(backend: Backend, request: GenerateRequest) -> Piece:
    scores: PromptScores | None = None
    async with backend.generate(request) as generation:
        async for generated in generation:
            scores = scores or generated.prompt_scores
            if generated.finish_reason is not None:
                break
        usage = structs.replace(generation.usage, completion_tokens=0)
    return Piece("", (), usage, "length", prompt_scores=scores)


async def share_prompt_scores(pieces: Pieces, per_prompt: int) -> Pieces:
    """Gives the scores that the first of each prompt's sequences got to all of them: what the
    others have is held back until these are there.
    """
    scores: dict[int, PromptScores] = {}
    held: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
    begun: set[int] = set()

    def with_scores(index: int, piece: Piece) -> Piece:
        if index in begun:
            return piece
        begun.add(index)
        return replace(piece, prompt_scores=scores[index // per_prompt])

    async with aclosing(pieces):
        async for index, piece in pieces:
            prompt = index // per_prompt
            if piece.prompt_scores is not None:
                scores[prompt] = piece.prompt_scores
            if prompt not in scores:
                held[prompt].append((index, piece))
                continue
            for each, early in (*held.pop(prompt, ()), (index, piece)):
                yield each, with_scores(each, early)


async def stream_all(
    backend: Backend,
    tokenizer: Tokenizer,
    requests: Sequence[GenerateRequest],
    options: TextOptions,
) -> Pieces:
    """The pieces of several sequences as they come, with the sequence's index."""
    if len(requests) == 1:
        # The usual case goes without a task and a queue of its own.
        async with aclosing(stream_pieces(backend, tokenizer, requests[0], options)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    results: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def run(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(stream_pieces(backend, tokenizer, request, options)) as pieces:
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    matched: str | None = None
    prompt_scores: PromptScores | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.logprobs.extend(piece.logprobs)
        self.usage = piece.usage
        self.finish_reason = piece.finish_reason
        self.matched = piece.matched
        self.prompt_scores = self.prompt_scores or piece.prompt_scores


async def collect_all(pieces: Pieces, count: int) -> list[Answer]:
    """The whole answers of `count` sequences; the first one that fails ends all."""
    answers = [Answer() for _ in range(count)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers


@dataclass(frozen=True)
class TotalUsage:
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def total_usage(usages: Mapping[int, Usage], per_prompt: int) -> TotalUsage:
    """Of several sequences by index, `per_prompt` of each prompt in a row: a prompt counts once.

    Sequences of one prompt share its pages, so what the first of them computed the others find in
    the caches: the prompt's sources are those of the one that computed most.
    """
    prompts: dict[int, Usage] = {}
    for index, usage in usages.items():
        known = prompts.setdefault(index // per_prompt, usage)
        if usage.cached_tokens < known.cached_tokens:
            prompts[index // per_prompt] = usage
    return TotalUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
        cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
    )
