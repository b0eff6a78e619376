"""The OpenAPI document of the public routes, from the models of their bodies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pd_cluster import __version__
from pd_cluster.gateway.customary import DetokenizeBody, TokenizeBody
from pd_cluster.gateway.http import json_response
from pd_cluster.gateway.native_bodies import NativeBody
from pd_cluster.gateway.openai_bodies import ChatBody, CompletionBody

# Route, what it does, body.
_BODIES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("/v1/completions", "Continue texts", CompletionBody),
    ("/v1/chat/completions", "Answer in a conversation", ChatBody),
    ("/generate", "Continue texts (SGLang's native route)", NativeBody),
    ("/tokenize", "A text's or a conversation's token ids", TokenizeBody),
    ("/detokenize", "The text of token ids", DetokenizeBody),
)
_READS = (
    ("/v1/models", "The models that are served"),
    ("/v1/models/{name}", "One model"),
    ("/model_info", "The model that is served"),
    ("/version", "The server's version"),
    ("/ping", "Whether the server runs"),
    ("/health", "Whether the server runs"),
    ("/health_generate", "Whether the cluster can generate a token"),
    ("/ready", "Whether requests can be served"),
    ("/server_info", "What is served, by which workers, and how loaded they are"),
    ("/metrics", "Prometheus metrics"),
    ("/admin/requests/{request_id}", "The story of a running or recent request"),
)
_ERRORS = {
    "400": "A field is wrong; the error names it",
    "401": "A key is missing or wrong",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "Too many requests wait; Retry-After says for how long",
    "503": "Not ready, or shutting down; Retry-After says for how long",
    "504": "Out of time",
}


def openapi_document() -> dict[str, Any]:
    template = "#/components/schemas/{model}"
    models = [(body, "validation") for _, _, body in _BODIES]
    refs, definitions = models_json_schema(models, ref_template=template)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, summary, body in _BODIES:
        content = {"application/json": {"schema": refs[body, "validation"]}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": _responses("application/json", "text/event-stream"),
            }
        }
    for path, summary in _READS:
        kind = "text/plain" if path == "/metrics" else "application/json"
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(kind)}
        if "{" in path:
            name = path[path.index("{") + 1 : -1]
            schema = {"type": "string", "minLength": 1}
            parameter = {"name": name, "in": "path", "required": True, "schema": schema}
            operation["parameters"] = [parameter]
        paths[path] = {"get": operation}
    paths["/flush_cache"] = {"post": _flush_cache()}
    schemas = {**definitions["$defs"], "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pd-cluster", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def openapi_routes() -> APIRouter:
    router = APIRouter()
    document = json_response(openapi_document()).body

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    return router


_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "request_id": {"type": "string"},
            },
            "required": ["message", "type", "param", "code", "request_id"],
        }
    },
    "required": ["error"],
}


def _responses(*kinds: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in _ERRORS.items()
    }
    return {"200": {"description": "Done", "content": {kind: {} for kind in kinds}}, **errors}


def _flush_cache() -> dict[str, Any]:
    role = {"name": "role", "in": "query", "schema": {"enum": ["prefill", "decode"]}}
    return {
        "summary": "Empty the prefix caches",
        "parameters": [role],
        "responses": _responses("application/json"),
    }
