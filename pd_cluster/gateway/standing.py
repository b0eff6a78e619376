"""Whose a request is, and how urgent: what a client may say of that, and what its key says."""

from __future__ import annotations

import hashlib

from starlette.requests import HTTPConnection

from pd_cluster.config import Config
from pd_cluster.errors import BadRequest
from pd_cluster.gateway.access import bearer_key
from pd_cluster.gateway.backend import Standing


def standing_of(
    http: HTTPConnection,
    config: Config,
    *,
    priority: int | None,
    routing_key: str | None,
    salt: str | None,
) -> Standing:
    """Raises BadRequest for a wish that this server's policies would not look at."""
    if priority and not config.uses_priority:
        raise BadRequest(
            "'priority' has no effect here: the server runs without --enable-priority-scheduling",
            param="priority",
            code="unsupported_parameter",
        )
    if routing_key is not None and config.schedule_policy != "routing-key":
        raise BadRequest(
            "'routing_key' has no effect here: it needs --schedule-policy routing-key",
            param="routing_key",
            code="unsupported_parameter",
        )
    return Standing(
        priority=priority or 0,
        tenant=_tenant(http, config, salt),
        routing_key=routing_key or "",
    )


def _tenant(http: HTTPConnection, config: Config, salt: str | None) -> str:
    """By API key where there are any, so that nobody gains by many salts; a digest, for it is told
    to other processes.
    """
    if config.api_keys:
        kind, secret = b"key", bearer_key(http)
    elif salt is not None:
        kind, secret = b"salt", salt.encode()
    else:
        return ""
    return hashlib.blake2b(secret, digest_size=8, person=kind).hexdigest()
