"""Routes for operators: health, readiness, server info, metrics, and emptying the caches."""

from __future__ import annotations

import hmac
import ipaddress
import platform
import time
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from pd_cluster import __version__
from pd_cluster.config import Config
from pd_cluster.errors import BadRequest, Unavailable
from pd_cluster.gateway.http import json_response
from pd_cluster.gateway.services import Services
from pd_cluster.observability.metrics import CONTENT_TYPE
from pd_cluster.types import Role

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}


def admin_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        reason = await services.backend.ready()
        if reason is not None:
            raise Unavailable(reason, code="not_ready", retry_after=1.0)
        return json_response({"status": "ready"})

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(await _server_info(services))

    @router.get("/metrics")
    async def metrics() -> Response:
        snapshot = await services.backend.snapshot()
        text = services.metrics.render(snapshot, time.monotonic())
        return Response(text, media_type=CONTENT_TYPE)

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request, role: str | None = None) -> Response:
        check_admin(request, services.config)
        if role is not None and role not in _ROLES:
            raise BadRequest(f"role must be prefill or decode, not {role!r}", param="role")
        done = await services.backend.flush(_ROLES[role] if role is not None else None)
        return json_response({"success": True, "workers": done})

    return router


def check_admin(request: Request, config: Config) -> None:
    """With an admin key: only with it. Without one: only from this machine."""
    if config.admin_key is not None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        if not hmac.compare_digest(given, config.admin_key.encode()):
            raise HTTPException(
                401,
                "this route needs the admin key: 'Authorization: Bearer KEY'",
                {"www-authenticate": "Bearer"},
            )
    elif not _is_loopback(request.client.host if request.client else ""):
        raise HTTPException(403, "without an admin key this route is for loopback only")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def _server_info(services: Services) -> dict[str, Any]:
    snapshot = await services.backend.snapshot()
    coordinator = snapshot.coordinator
    return {
        "model": services.model.name,
        "context_length": services.model.context_length,
        "max_total_tokens": services.model.pool_capacity,
        "versions": {
            "pd_cluster": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "ray": version("ray"),
        },
        "cache_hit_rate": services.metrics.cache_hit_rate,
        "totals": services.metrics.totals,
        "coordinator": coordinator,
        "workers": snapshot.workers,
        # The key is nobody's business, not even whether there is one.
        "config": services.config.model_dump(mode="json", exclude={"admin_key"}),
    }
