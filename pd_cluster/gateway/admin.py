"""Routes for operators: health, readiness, server info, metrics, caches, and requests' stories."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from pd_cluster import __version__
from pd_cluster.errors import BadRequest, NotFound, Unavailable
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
        reason = "shutting down" if services.gate.closing else await services.backend.ready()
        if reason is not None:
            raise Unavailable(reason, code="not_ready", retry_after=1.0)
        return json_response({"status": "ready"})

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(await _server_info(services))

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type=CONTENT_TYPE)

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(role: str | None = None) -> Response:
        if role is not None and role not in _ROLES:
            raise BadRequest(f"role must be prefill or decode, not {role!r}", param="role")
        done = await services.backend.flush(_ROLES[role] if role is not None else None)
        return json_response({"success": True, "workers": done})

    @router.get("/admin/requests/{request_id:path}")
    async def story(request_id: str) -> Response:
        # Answers' ids are the request's with the name of their kind before it.
        name = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        sequences = services.backend.stories(name)
        if not sequences:
            message = f"no request {request_id!r} is running or among the recent ones"
            raise NotFound(message, param="request_id", code="request_not_found")
        explained = [
            {**each, "placements": await services.backend.placements(each["id"], each["attempts"])}
            for each in sequences
        ]
        return json_response({"id": request_id, "sequences": explained})

    return router


async def _server_info(services: Services) -> dict[str, Any]:
    snapshot = await services.backend.snapshot()
    coordinator = snapshot.coordinator
    return {
        "model": services.model.name,
        "context_length": services.model.context_length,
        "max_total_tokens": services.model.pool_capacity,
        # Of each worker of a role.
        "kv_pool": dict.fromkeys(_ROLES, services.model.kv_pool),
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
        # The keys are nobody's business, not even whether there are any.
        "config": services.config.model_dump(mode="json", exclude={"admin_key", "api_keys"}),
    }
