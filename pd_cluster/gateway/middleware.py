"""Around every request: its id, who may come in, and one line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_cluster.config import Config
from pd_cluster.errors import RequestError, Unavailable
from pd_cluster.gateway.access import OPEN, check_access
from pd_cluster.gateway.gate import Gate
from pd_cluster.gateway.http import error_response, internal_error_body, json_response
from pd_cluster.gateway.record import RequestRecord

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# The routes whose requests the gate counts: those that may take long.
_WORK = frozenset({"/v1/completions", "/v1/chat/completions", "/generate", "/health_generate"})


class RequestContext:
    """ASGI middleware. Notes when a request arrived, gives it a RequestRecord (`state.record`) and
    an id that the answer carries, and answers our own bugs.
    """

    def __init__(self, app: ASGIApp, config: Config, gate: Gate) -> None:
        self._app = app
        self._config = config
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record(scope)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = (b"x-request-id", record.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        if scope["method"] == "HEAD":
            # What GET would say: in our copy only, for the server leaves the body out.
            scope = {**scope, "method": "GET"}
        try:
            await self._answer(scope, receive, send_with_id, record)
        except Exception as error:
            if record.status is not None:
                raise
            logger.exception("%s %s (request %s)", record.method, record.path, record.unique_id)
            body = internal_error_body(error, record.request_id)
            record.error = "internal_error"
            await json_response(body, 500)(scope, receive, send_with_id)
        finally:
            # Probes and scrapes come every few seconds, and say nothing.
            if record.path not in OPEN:
                record.log()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        is_work = record.path in _WORK
        try:
            check_access(HTTPConnection(scope), self._config)
            if is_work and self._gate.closing:
                raise Unavailable("the server is shutting down", code="shutting_down")
        except RequestError as error:
            record.error = error.code
            await error_response(error, record.request_id)(scope, receive, send)
            return
        if not is_work:
            await self._app(scope, receive, send)
            return
        self._gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()


def _record(scope: Scope) -> RequestRecord:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    # Clients may send one id twice, at the same time even: what we call a request is never reused.
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    unique_id = f"{request_id}-{uuid.uuid4().hex[:12]}" if request_id == given else request_id
    arrival = time.monotonic()
    return RequestRecord(request_id, unique_id, scope["method"], scope["path"], arrival)
