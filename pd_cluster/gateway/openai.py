"""OpenAI's routes: /v1/models, /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from pd_cluster.gateway.answer import collect_all, share_prompt_scores, stream_all
from pd_cluster.gateway.backend import GenerateRequest, Standing
from pd_cluster.gateway.http import json_response, read_json, record_of, until_disconnected
from pd_cluster.gateway.messages import check_number
from pd_cluster.gateway.openai_bodies import ChatBody, CompletionBody, OpenAIBody
from pd_cluster.gateway.openai_format import AnswerFormat, ChatFormat, CompletionFormat
from pd_cluster.gateway.prepare import Wishes
from pd_cluster.gateway.services import Services
from pd_cluster.gateway.sse import stream_response
from pd_cluster.gateway.standing import standing_of
from pd_cluster.gateway.text import TextOptions

F = TypeVar("F", bound=AnswerFormat)

# OpenAI's default for completions; a chat answer may take what is left of the context.
COMPLETION_MAX_TOKENS = 16


def openai_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1")
    started = int(time.time())
    model, config, prepare = services.model, services.config, services.prepare
    names = (model.name, *model.aliases)

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "pd-cluster",
            "root": model.name,
            "max_model_len": model.context_length,
        }

    @router.get("/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [model_card(name) for name in names]})

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> Response:
        services.check_model(name)
        return json_response(model_card(name))

    @router.post("/completions")
    async def completions(http: Request) -> Response:
        body = CompletionBody.parse(await read_json(http, config))
        services.check_model(body.model)
        special = body.add_special_tokens is not False
        prompts = [
            await prepare.tokenize(prompt, "prompt", add_special_tokens=special)
            for prompt in body.prompt
        ]
        wishes = Wishes(
            prompt_param="prompt",
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            min_tokens=body.min_tokens,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_scores,
            seed=body.seed,
            namespace=body.cache_salt,
            timeout_s=body.timeout,
            standing=standing(http, body),
        )
        shape = make_format(CompletionFormat, http, body, prompts)
        shape.top_logprobs = max(0, body.num_logprobs)
        if body.echo:
            shape.echoes = [
                each if isinstance(each, str) else services.tokenizer.decode(each)
                for each in body.prompt
            ]
        return await answer(http, body, prompts, wishes, shape, body.prompt)

    @router.post("/chat/completions")
    async def chat(http: Request) -> Response:
        body = ChatBody.parse(await read_json(http, config))
        services.check_model(body.model)
        check_number(body.messages, config.max_messages)
        new_name = body.max_completion_tokens is not None
        wishes = Wishes(
            prompt_param="messages",
            max_tokens=body.max_completion_tokens if new_name else body.max_tokens,
            max_tokens_param="max_completion_tokens" if new_name else "max_tokens",
            min_tokens=body.min_tokens,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_scores,
            seed=body.seed,
            namespace=body.cache_salt,
            timeout_s=body.timeout,
            standing=standing(http, body),
        )
        prompt = await prepare.apply_template(body.messages, body.offered_tools)
        shape = make_format(ChatFormat, http, body, [prompt])
        asked = [message.rendered for message in body.messages]
        return await answer(http, body, [prompt], wishes, shape, asked)

    def standing(http: Request, body: OpenAIBody) -> Standing:
        return standing_of(
            http,
            config,
            priority=body.priority,
            routing_key=body.routing_key,
            salt=body.cache_salt,
        )

    def make_format(
        kind: type[F], http: Request, body: OpenAIBody, prompts: Sequence[Sequence[int]]
    ) -> F:
        return kind(
            record_of(http).unique_id,
            body.model or model.name,
            services.tokenizer,
            per_prompt=body.sequences,
            with_logprobs=body.num_logprobs >= 0,
            prompts=prompts,
            prompt_logprobs=body.prompt_logprobs,
        )

    async def answer(
        http: Request,
        body: OpenAIBody,
        prompts: Sequence[Sequence[int]],
        wishes: Wishes,
        shape: AnswerFormat,
        asked: object,
    ) -> Response:
        record = record_of(http)
        requests: list[GenerateRequest] = prepare.requests(
            record.unique_id, prompts, body, wishes, arrival=record.arrival
        )
        services.metrics.stage("tokenize", time.monotonic() - record.arrival)
        record.details = {"stream": bool(body.stream), "choices": len(requests)}
        if config.log_prompts:
            record.prompt = asked
        options = TextOptions(
            stops=tuple(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        )
        pieces = stream_all(services.backend, services.tokenizer, requests, options)
        if body.num_scores >= 0 and body.sequences > 1:
            pieces = share_prompt_scores(pieces, body.sequences)
        pieces = record.watch(pieces, body.sequences)
        if body.stream:
            events = shape.events(pieces, include_usage=body.include_usage)
            return await stream_response(http, events, config.timeouts.keepalive_s)
        answers = await until_disconnected(http, collect_all(pieces, len(requests)))
        return json_response(shape.whole(answers))

    return router
