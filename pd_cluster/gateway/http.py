"""What every route needs of HTTP: bodies, errors, request ids, and clients that hang up."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import pydantic_core
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.errors import BadRequest, RequestError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client hung up: the work was stopped, and nobody reads the answer."""


class PayloadTooLarge(BadRequest):
    status = 413


class RequestContext:
    """ASGI middleware around every request.

    Notes when it arrived, gives it an id that the answer carries, and answers our own bugs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["arrival"] = time.monotonic()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            logger.exception("%s %s", scope["method"], scope["path"])
            await json_response(internal_error_body(error), 500)(scope, receive, send_with_id)


async def read_json(request: Request) -> Any:
    """The body as JSON, whatever its Content-Type says."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
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


async def stop_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels and waits until each has run its clean-up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_body(error: RequestError) -> dict[str, Any]:
    return _error_body(error.message, error.kind, error.param, error.code)


def error_response(error: RequestError) -> Response:
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    return json_response(error_body(error), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every failure is answered in one shape."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        if status == HTTPStatus.NOT_FOUND:
            message, kind = f"no route {request.url.path}", "not_found_error"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.method} is not allowed for {request.url.path}"
            kind = "invalid_request_error"
        else:
            message, kind = str(error.detail), "invalid_request_error"
        body = _error_body(message, kind, None, HTTPStatus(status).name.lower())
        return json_response(body, status, dict(error.headers or {}))

    @app.exception_handler(ClientDisconnected)
    async def on_disconnect(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)


def internal_error_body(error: Exception) -> dict[str, Any]:
    return _error_body(
        f"internal error: {type(error).__name__}", "server_error", None, "internal_error"
    )


def _error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {MAX_BODY_BYTES} bytes", code="payload_too_large"
    )
