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
    ClientDisconnected,
    disconnected,
    error_body,
    internal_error_body,
    record_of,
)
from pd_cluster.gateway.record import RequestRecord
from pd_cluster.gateway.tasks import stop_tasks

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# A comment, which clients pass over: proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], keepalive_s: float
) -> Response:
    """Answers with `events` and [DONE], and with a comment after each `keepalive_s` seconds without
    any.

    Waits for the first event, so that what fails before it is answered with a status of its own;
    but no longer than `keepalive_s`. What fails later is an error event and the end of the stream,
    without [DONE]. When the client hangs up, `events` is closed.
    """
    first = asyncio.create_task(_first(events))
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait(
            {first, watcher}, timeout=keepalive_s, return_when=asyncio.FIRST_COMPLETED
        )
        if first.done():
            first.result()
        elif watcher.done():
            raise ClientDisconnected
    except BaseException:
        await stop_tasks(first)
        await events.aclose()
        raise
    finally:
        await stop_tasks(watcher)
    return _EventStream(first, events, record_of(request), keepalive_s)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes, None],
        record: RequestRecord,
        keepalive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._chunks = _all_events(first, events, record)
        self._keepalive_s = keepalive_s
        self._quiet = not first.done()

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
            await stop_tasks(sending, watcher, self._first)
            await self._chunks.aclose()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        comments = asyncio.create_task(self._keep_alive(send))
        try:
            async for chunk in self._chunks:
                self._quiet = False
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await stop_tasks(comments)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            if self._quiet:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._quiet = True
            await asyncio.sleep(self._keepalive_s)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _all_events(
    first: asyncio.Task[bytes], events: AsyncGenerator[bytes, None], record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            yield await first
            async for each in events:
                yield each
        except RequestError as error:
            record.error = error.code
            yield event(error_body(error, record.request_id))
        except Exception as error:
            logger.exception("request %s: the stream failed", record.unique_id)
            record.error = "internal_error"
            yield event(internal_error_body(error, record.request_id))
        else:
            yield DONE
