"""What every route needs of HTTP: bodies, errors, and clients that hang up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import pydantic_core
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive

from pd_cluster.config import Config
from pd_cluster.errors import BadRequest, BodyTooSlow, PayloadTooLarge, RequestError
from pd_cluster.gateway.record import RequestRecord
from pd_cluster.gateway.tasks import stop_tasks

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client hung up: the work was stopped, and nobody reads the answer."""


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


async def read_json(request: Request, config: Config) -> Any:
    """The body as JSON, whatever its Content-Type says; nested no deeper than 200. Waits for it no
    longer than a request may take.
    """
    most, limit = config.max_body_bytes, config.timeouts.request_s
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise _too_large(most)
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooSlow(
            f"{size} bytes of the body came within timeouts.request_s ({limit:g} s), not all of it",
            code="body_too_slow",
        ) from error
    try:
        return pydantic_core.from_json(b"".join(chunks), allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; stops it and raises ClientDisconnected when the client hangs up first.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await stop_tasks(task, watcher)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    return _error_body(error.message, error.kind, error.param, error.code, request_id)


def error_response(error: RequestError, request_id: str) -> Response:
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if error.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        headers["connection"] = "close"  # else the rest of the body would be waited for
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error, request_id), error.status, headers)


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Every failure is answered in one shape. `routes` are all that the application has."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        record = record_of(request)
        record.error = error.code
        return error_response(error, record.request_id)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ", ".join(_allowed_methods(request, routes))
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        if status == HTTPStatus.NOT_FOUND:
            message, kind = f"no route {request.url.path}", "not_found_error"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            message = (
                f"{record_of(request).method} is not allowed for {request.url.path}:"
                f" {headers['allow']}"
            )
            kind = "invalid_request_error"
        else:
            message, kind = str(error.detail), "invalid_request_error"
        code, record = HTTPStatus(status).name.lower(), record_of(request)
        record.error = code
        body = _error_body(message, kind, None, code, record.request_id)
        return json_response(body, status, headers)

    @app.exception_handler(ClientDisconnected)
    async def on_disconnect(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)


def _allowed_methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """Of all routes with this path; HEAD goes wherever GET does."""
    methods = {"OPTIONS"}
    for route in routes:
        matched, _ = route.matches(request.scope)
        if matched is not Match.NONE and isinstance(route, Route):
            methods |= set(route.methods or ())
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def internal_error_body(error: Exception, request_id: str) -> dict[str, Any]:
    message = f"internal error: {type(error).__name__}"
    return _error_body(message, "server_error", None, "internal_error", request_id)


def _error_body(
    message: str, kind: str, param: str | None, code: str | None, request_id: str
) -> dict[str, Any]:
    """OpenAI's shape, and the id by which logs and /admin/requests know the request."""
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            "request_id": request_id,
        }
    }


def _too_large(max_bytes: int) -> PayloadTooLarge:
    message = f"the body is larger than {max_bytes} bytes (max_body_bytes)"
    return PayloadTooLarge(message, code="payload_too_large")
