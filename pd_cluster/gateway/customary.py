"""Routes that clients and tools expect because SGLang, vLLM or their platforms have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from pd_cluster import __version__
from pd_cluster.errors import BadRequest
from pd_cluster.gateway.backend import GenerateRequest
from pd_cluster.gateway.http import json_response, read_json, record_of, until_disconnected
from pd_cluster.gateway.messages import MAX_TOOLS, ChatMessage, Tool, check_number
from pd_cluster.gateway.protocol import Body, TokenId
from pd_cluster.gateway.services import Services
from pd_cluster.gateway.stories import sequence_id
from pd_cluster.types import SamplingParams

# A probe that takes longer has failed (seconds), as SGLang's.
PROBE_S = 20.0


class TokenizeBody(Body):
    """Exactly one of `prompt` and `messages`; vLLM's fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give exactly one of 'prompt' and 'messages'", param="prompt")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


def customary_routes(services: Services) -> APIRouter:
    router = APIRouter()
    config, model = services.config, services.model

    @router.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return json_response({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        # The folder is the server's own affair.
        return json_response(
            {
                "model_path": config.model,
                "served_model_name": model.name,
                "is_generation": True,
                "max_model_len": model.context_length,
                "vocab_size": model.vocab_size or services.tokenizer.vocab_size,
                "preferred_sampling_params": dict(model.sampling_defaults),
            }
        )

    @router.get("/health_generate")
    async def health_generate(http: Request) -> Response:
        """A token, by way of the whole cluster."""
        record = record_of(http)
        request = GenerateRequest(
            request_id=sequence_id(record.unique_id, 0),
            prompt=(0,),
            params=SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
            arrival=record.arrival,
            timeout_s=PROBE_S,
        )

        async def generate() -> None:
            async with services.backend.generate(request) as generation:
                async for _ in generation:
                    pass

        # Read for its end: whoever hangs up wants no answer.
        await http.body()
        await until_disconnected(http, generate())
        return json_response({"status": "ok"})

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        body = TokenizeBody.parse(await read_json(http, config))
        services.check_model(body.model)
        ids = await _ids(body)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.context_length,
            "tokens": ids,
        }
        if body.return_token_strs:
            text_of = services.tokenizer.token_bytes
            answer["token_strs"] = [text_of(each).decode(errors="replace") for each in ids]
        return json_response(answer)

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        body = DetokenizeBody.parse(await read_json(http, config))
        services.check_model(body.model)
        services.prepare.check_ids(body.tokens, "tokens")
        skip = bool(body.skip_special_tokens)
        text = services.tokenizer.decode(body.tokens, skip_special_tokens=skip)
        return json_response({"prompt": text})

    async def _ids(body: TokenizeBody) -> Sequence[int]:
        if body.messages is None:
            assert body.prompt is not None
            special = body.add_special_tokens is not False
            return await services.prepare.tokenize(
                body.prompt, "prompt", add_special_tokens=special
            )
        check_number(body.messages, config.max_messages)
        return await services.prepare.apply_template(
            body.messages,
            [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            add_generation_prompt=body.add_generation_prompt is not False,
        )

    return router
