"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI

from pd_cluster import __version__
from pd_cluster.config import Config
from pd_cluster.gateway.admin import admin_routes
from pd_cluster.gateway.backend import Backend, ModelInfo
from pd_cluster.gateway.customary import customary_routes
from pd_cluster.gateway.gate import Gate
from pd_cluster.gateway.http import install_error_handlers
from pd_cluster.gateway.middleware import RequestContext
from pd_cluster.gateway.native import native_routes
from pd_cluster.gateway.openai import openai_routes
from pd_cluster.gateway.openapi import openapi_routes
from pd_cluster.gateway.prepare import Preparer
from pd_cluster.gateway.scale import scale_routes
from pd_cluster.gateway.services import Services
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.observability.metrics import GatewayMetrics


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    model: ModelInfo,
    config: Config,
    metrics: GatewayMetrics,
    gate: Gate | None = None,
) -> FastAPI:
    """Serves `backend` over HTTP. `metrics` are those that the backend counts in; who ends the
    server closes `gate` first.
    """
    gate = gate or Gate()
    prepare = Preparer(tokenizer, model)
    services = Services(backend, tokenizer, model, config, metrics, prepare, gate)
    app = FastAPI(
        title="pd-cluster", version=__version__, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.add_middleware(RequestContext, config=config, gate=gate)
    routers = [
        openai_routes(services),
        native_routes(services),
        customary_routes(services),
        admin_routes(services),
        scale_routes(services),
        openapi_routes(),
    ]
    install_error_handlers(app, [route for router in routers for route in router.routes])
    for router in routers:
        app.include_router(router)
    return app
