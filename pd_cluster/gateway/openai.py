"""OpenAI's routes: /v1/models, /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from pd_cluster.errors import NotFound
from pd_cluster.gateway.answer import Answer, Piece, collect_all, stream_all
from pd_cluster.gateway.backend import GenerateRequest
from pd_cluster.gateway.http import json_response, read_json, until_disconnected
from pd_cluster.gateway.instructions import Usage
from pd_cluster.gateway.openai_bodies import ChatBody, CompletionBody, OpenAIBody
from pd_cluster.gateway.services import Services
from pd_cluster.gateway.sse import event, stream_response

# OpenAI's default for completions; a chat answer may take what is left of the context.
COMPLETION_MAX_TOKENS = 16


def openai_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1")
    started = int(time.time())
    model = services.model

    def model_card() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": started,
            "owned_by": "pd-cluster",
            "max_model_len": model.context_length,
        }

    def check_model(name: str | None) -> None:
        if name not in (None, model.name):
            raise NotFound(
                f"the model {name!r} is not served here; {model.name!r} is",
                param="model",
                code="model_not_found",
            )

    @router.get("/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> Response:
        check_model(name)
        return json_response(model_card())

    @router.post("/completions")
    async def completions(http: Request) -> Response:
        body = CompletionBody.parse(await read_json(http))
        check_model(body.model)
        arrival = http.state.arrival
        requests = []
        for prompt in body.prompt:
            ids = await services.prepare.tokenize(prompt, "prompt")
            request = services.prepare.request(
                uuid.uuid4().hex,
                ids,
                body,
                arrival=arrival,
                prompt_param="prompt",
                max_tokens=body.max_tokens,
                default_max_tokens=COMPLETION_MAX_TOKENS,
                seed=body.seed,
                namespace=body.cache_salt,
            )
            requests.append(request)
        services.metrics.stage("tokenize", time.monotonic() - arrival)
        return await answer(http, body, requests, _CompletionFormat(model.name))

    @router.post("/chat/completions")
    async def chat(http: Request) -> Response:
        body = ChatBody.parse(await read_json(http))
        check_model(body.model)
        arrival = http.state.arrival
        messages = [
            {
                # Models know the role by its older name.
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
                **({"name": message.name} if message.name is not None else {}),
            }
            for message in body.messages
        ]
        new_name = body.max_completion_tokens is not None
        request = services.prepare.request(
            uuid.uuid4().hex,
            await services.prepare.apply_template(messages),
            body,
            arrival=arrival,
            prompt_param="messages",
            max_tokens=body.max_completion_tokens if new_name else body.max_tokens,
            max_tokens_param="max_completion_tokens" if new_name else "max_tokens",
            seed=body.seed,
            namespace=body.cache_salt,
        )
        services.metrics.stage("tokenize", time.monotonic() - arrival)
        return await answer(http, body, [request], _ChatFormat(model.name))

    async def answer(
        http: Request, body: OpenAIBody, requests: Sequence[GenerateRequest], shape: _Format
    ) -> Response:
        if body.stream:
            pieces = stream_all(services.backend, services.tokenizer, requests, body.stop)
            return await stream_response(http, _events(pieces, shape, body.include_usage))
        work = collect_all(services.backend, services.tokenizer, requests, body.stop)
        answers = await until_disconnected(http, work)
        return json_response(shape.whole(answers))

    return router


async def _events(
    pieces: AsyncGenerator[tuple[int, Piece], None], shape: _Format, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    seen: set[int] = set()
    usages: list[Usage] = []
    async with aclosing(pieces):
        async for index, piece in pieces:
            for choice in shape.deltas(index, piece, first=index not in seen):
                yield event({**shape.chunk_head, "choices": [choice], **extra})
            seen.add(index)
            if piece.finish_reason is not None:
                usages.append(piece.usage)
    if include_usage:
        yield event({**shape.chunk_head, "choices": [], "usage": usage_body(usages)})


class _Format:
    """How one route writes its answers."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str) -> None:
        head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head = {**head, "object": self.kind, "model": model}
        self.chunk_head = {**head, "object": self.chunk_kind, "model": model}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        usages = [answer.usage for answer in answers if answer.usage is not None]
        return {**self.head, "choices": choices, "usage": usage_body(usages)}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        """The choices that a piece gives; each goes into a chunk of its own."""
        raise NotImplementedError


class _CompletionFormat(_Format):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        if not (piece.text or piece.finish_reason or first):
            return []
        reason = piece.finish_reason
        return [{"index": index, "text": piece.text, "logprobs": None, "finish_reason": reason}]


class _ChatFormat(_Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def deltas(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        choices = []
        if first:
            choices.append(self._delta(index, {"role": "assistant", "content": ""}))
        if piece.text:
            choices.append(self._delta(index, {"content": piece.text}))
        if piece.finish_reason is not None:
            choices.append(self._delta(index, {}, piece.finish_reason))
        return choices

    def _delta(
        self, index: int, delta: dict[str, str], finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
