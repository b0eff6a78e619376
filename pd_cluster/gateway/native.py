"""SGLang's native route, /generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.answer import Answer, Piece, collect_all, stream_all
from pd_cluster.gateway.http import json_response, read_json, until_disconnected
from pd_cluster.gateway.native_bodies import NativeBody
from pd_cluster.gateway.services import Services
from pd_cluster.gateway.sse import event, stream_response

# SGLang's default.
MAX_NEW_TOKENS = 128


def native_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(http: Request) -> Response:
        body = NativeBody.parse(await read_json(http))
        sampling = body.sampling_params
        seeds = {sampling.seed, sampling.sampling_seed} - {None}
        if len(seeds) > 1:
            raise BadRequest("'seed' and 'sampling_seed' differ", param="sampling_seed")
        arrival = http.state.arrival
        param = "input_ids" if body.text is None else "text"
        requests = []
        for prompt in body.prompts:
            request = services.prepare.request(
                uuid.uuid4().hex,
                await services.prepare.tokenize(prompt, param),
                sampling,
                arrival=arrival,
                prompt_param=param,
                max_tokens=sampling.max_new_tokens,
                max_tokens_param="max_new_tokens",
                default_max_tokens=MAX_NEW_TOKENS,
                seed=next(iter(seeds), None),
                namespace=body.extra_key,
            )
            requests.append(request)
        services.metrics.stage("tokenize", time.monotonic() - arrival)
        names = body.rid if isinstance(body.rid, list) else [body.rid] if body.rid else None
        ids = names or [request.request_id for request in requests]
        if body.stream:
            pieces = stream_all(services.backend, services.tokenizer, requests, sampling.stop)
            events = _events(pieces, ids, arrival, is_batch=body.is_batch)
            return await stream_response(http, events)
        work = collect_all(services.backend, services.tokenizer, requests, sampling.stop)
        answers = await until_disconnected(http, work)
        bodies = [_body(answer, ids[index], arrival) for index, answer in enumerate(answers)]
        return json_response(bodies if body.is_batch else bodies[0])

    return router


async def _events(
    pieces: AsyncGenerator[tuple[int, Piece], None],
    ids: Sequence[str],
    arrival: float,
    *,
    is_batch: bool,
) -> AsyncGenerator[bytes, None]:
    """As SGLang streams: each event has the whole text so far."""
    answers = [Answer() for _ in ids]
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
            body = _body(answers[index], ids[index], arrival)
            yield event({**body, "index": index} if is_batch else body)


def _body(answer: Answer, request_id: str, arrival: float) -> dict[str, Any]:
    assert answer.usage is not None
    return {
        "text": answer.text,
        "output_ids": answer.tokens,
        "meta_info": {
            "id": request_id,
            "finish_reason": _finish_reason(answer),
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "cached_tokens": answer.usage.cached_tokens,
            "e2e_latency": time.monotonic() - arrival,
        },
    }


def _finish_reason(answer: Answer) -> dict[str, Any] | None:
    match answer.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(answer.tokens)}
        case "stop":
            matched = answer.matched if answer.matched is not None else answer.tokens[-1]
            return {"type": "stop", "matched": matched}
