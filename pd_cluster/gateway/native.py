"""SGLang's native route, /generate."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from pd_cluster.gateway.answer import (
    Answer,
    Pieces,
    collect_all,
    share_prompt_scores,
    stream_all,
)
from pd_cluster.gateway.http import json_response, read_json, record_of, until_disconnected
from pd_cluster.gateway.logprobs import native_logprobs, prompt_entries
from pd_cluster.gateway.native_bodies import NativeBody
from pd_cluster.gateway.prepare import Wishes
from pd_cluster.gateway.services import Services
from pd_cluster.gateway.sse import event, stream_response
from pd_cluster.gateway.standing import standing_of
from pd_cluster.gateway.text import TextOptions
from pd_cluster.model.tokenizer import Tokenizer

# SGLang's default.
MAX_NEW_TOKENS = 128


def native_routes(services: Services) -> APIRouter:
    router = APIRouter()
    config = services.config

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(http: Request) -> Response:
        body = NativeBody.parse(await read_json(http, config))
        sampling, record = body.sampling_params, record_of(http)
        param = "input_ids" if body.text is None else "text"
        wishes = Wishes(
            prompt_param=param,
            max_tokens=sampling.max_new_tokens,
            max_tokens_param="max_new_tokens",
            default_max_tokens=MAX_NEW_TOKENS,
            min_tokens=sampling.min_new_tokens,
            min_tokens_param="min_new_tokens",
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_logprobs if body.scores_from is not None else -1,
            seed=sampling.seed if sampling.seed is not None else sampling.sampling_seed,
            namespace=body.extra_key,
            timeout_s=body.timeout,
            standing=standing_of(
                http,
                config,
                priority=body.priority,
                routing_key=body.routing_key,
                salt=body.extra_key,
            ),
        )
        prompts = [await services.prepare.tokenize(prompt, param) for prompt in body.prompts]
        requests = services.prepare.requests(
            record.unique_id, prompts, sampling, wishes, arrival=record.arrival
        )
        services.metrics.stage("tokenize", time.monotonic() - record.arrival)
        record.details = {"stream": body.stream, "choices": len(requests)}
        if config.log_prompts:
            record.prompt = body.prompts
        options = TextOptions(
            stops=tuple(sampling.stop),
            include_stop=bool(sampling.no_stop_trim),
            skip_special_tokens=sampling.skip_special_tokens is not False,
            min_tokens=sampling.min_new_tokens or 0,
        )
        pieces = stream_all(services.backend, services.tokenizer, requests, options)
        if body.scores_from is not None and sampling.sequences > 1:
            pieces = share_prompt_scores(pieces, sampling.sequences)
        pieces = record.watch(pieces, sampling.sequences)
        shape = _Format(body, prompts, services.tokenizer, record.unique_id, record.arrival)
        if body.stream:
            events = shape.events(pieces, len(requests))
            return await stream_response(http, events, config.timeouts.keepalive_s)
        answers = await until_disconnected(http, collect_all(pieces, len(requests)))
        bodies = [shape.body(index, answer) for index, answer in enumerate(answers)]
        return json_response(bodies if shape.is_list else bodies[0])

    return router


class _Format:
    def __init__(
        self,
        body: NativeBody,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        request_id: str,
        arrival: float,
    ) -> None:
        self._prompts = prompts
        self.is_list = body.is_batch or body.sampling_params.sequences > 1
        self._body = body
        self._tokenizer = tokenizer
        self._arrival = arrival
        self._names = _names(body, request_id)

    async def events(self, pieces: Pieces, count: int) -> AsyncGenerator[bytes, None]:
        """As SGLang streams: each event has the whole text so far."""
        answers = [Answer() for _ in range(count)]
        async with aclosing(pieces):
            async for index, piece in pieces:
                answers[index].add(piece)
                body = self.body(index, answers[index])
                yield event({**body, "index": index} if self.is_list else body)

    def body(self, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.usage is not None
        body, logprobs = self._body, {}
        if body.num_logprobs >= 0:
            logprobs = native_logprobs(
                self._tokenizer,
                answer.logprobs,
                texts=bool(body.return_text_in_logprobs),
                top=body.num_logprobs > 0,
            )
        if body.scores_from is not None and answer.prompt_scores is not None:
            prompt = self._prompts[index // body.sampling_params.sequences]
            first = min(body.scores_from, len(prompt))
            logprobs |= native_logprobs(
                self._tokenizer,
                prompt_entries(prompt, answer.prompt_scores)[max(0, first - 1) :],
                texts=bool(body.return_text_in_logprobs),
                top=body.num_logprobs > 0,
                side="input",
                unscored=prompt[:1] if first == 0 else (),
            )
        return {
            "text": answer.text,
            "output_ids": answer.tokens,
            "meta_info": {
                "id": self._names[index],
                "finish_reason": _finish_reason(answer),
                "prompt_tokens": answer.usage.prompt_tokens,
                "completion_tokens": answer.usage.completion_tokens,
                "cached_tokens": answer.usage.cached_tokens,
                "e2e_latency": time.monotonic() - self._arrival,
                **logprobs,
            },
        }


def _names(body: NativeBody, request_id: str) -> Sequence[str]:
    """What the answers call themselves: the client's name for each prompt, else ours."""
    sequences = body.sampling_params.sequences
    count = len(body.prompts) * sequences
    if body.rid is None:
        return [f"{request_id}.{index}" for index in range(count)] if count > 1 else [request_id]
    given = body.rid if isinstance(body.rid, list) else [body.rid]
    if sequences == 1:
        return given
    return [f"{name}.{sequence}" for name in given for sequence in range(sequences)]


def _finish_reason(answer: Answer) -> dict[str, Any] | None:
    match answer.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(answer.tokens)}
        case "stop":
            matched = answer.matched if answer.matched is not None else answer.tokens[-1]
            return {"type": "stop", "matched": matched}
