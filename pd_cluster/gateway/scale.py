"""Routes for operators: how many workers and gateways there are and shall be."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pd_cluster.errors import BadRequest, NotFound, RequestError, Unavailable
from pd_cluster.gateway.http import json_response, read_json
from pd_cluster.gateway.services import Services
from pd_cluster.scaling import Refusal, ScalingStatus, Wish, parse_counts

_REFUSALS: dict[int, type[RequestError]] = {400: BadRequest, 404: NotFound}


def scale_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/admin/scale")
    async def scale(request: Request) -> Response:
        wish = parse_counts(await read_json(request, services.config))
        return await _wish(services, wish)

    @router.get("/admin/scale")
    async def scaling() -> Response:
        status = await services.backend.scaling()
        if status is None:
            raise Unavailable("nothing is known of the actors yet", retry_after=1.0)
        return json_response(_describe(status))

    @router.post("/admin/workers/{name}/drain")
    async def drain(name: str) -> Response:
        return await _wish(services, Wish(drain=name))

    @router.get("/admin/workers")
    async def workers() -> Response:
        snapshot = await services.backend.snapshot()
        if snapshot.coordinator is None:
            raise Unavailable("the coordinator does not answer", retry_after=1.0)
        return json_response({"workers": snapshot.coordinator.workers})

    return router


async def _wish(services: Services, wish: Wish) -> Response:
    answer = await services.backend.wish(wish)
    if isinstance(answer, Refusal):
        kind = _REFUSALS.get(answer.status, Unavailable)
        raise kind(answer.message, code="not_scaled")
    return json_response(_describe(answer), status=202)


def _describe(status: ScalingStatus) -> dict[str, Any]:
    """The field names that requests have."""
    counts = status.counts
    numbers = {"prefill": counts.prefill, "decode": counts.decode, "gateways": counts.gateway}
    return {**msgspec.structs.asdict(status), "counts": numbers}
