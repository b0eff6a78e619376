"""Server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from pd_cluster.errors import RequestError
from pd_cluster.gateway.http import (
    disconnected,
    error_body,
    internal_error_body,
    stop_tasks,
    until_disconnected,
)

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def stream_response(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Answers with `events` and [DONE].

    Waits for the first event, so that what fails before it is answered with a status of its own.
    What fails later is an error event and the end of the stream, without [DONE]. When the client
    hangs up, `events` is closed.
    """
    try:
        first = await until_disconnected(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(_all_events(first, events))


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the connection broke while we were sending
        finally:
            await stop_tasks(sending, watcher)
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _all_events(
    first: bytes, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        try:
            async for each in events:
                yield each
        except RequestError as error:
            yield event(error_body(error))
        except Exception as error:
            logger.exception("a stream failed")
            yield event(internal_error_body(error))
        else:
            yield DONE
