"""What the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.config import Config
from pd_cluster.errors import NotFound
from pd_cluster.gateway.backend import Backend, ModelInfo
from pd_cluster.gateway.gate import Gate
from pd_cluster.gateway.prepare import Preparer
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.observability.metrics import GatewayMetrics


@dataclass(frozen=True)
class Services:
    backend: Backend
    tokenizer: Tokenizer
    model: ModelInfo
    config: Config
    metrics: GatewayMetrics
    prepare: Preparer
    gate: Gate

    def check_model(self, name: str | None) -> None:
        """Raises NotFound for a model that is not served."""
        names = (self.model.name, *self.model.aliases)
        if name is not None and name not in names:
            raise NotFound(
                f"the model {name!r} is not served here; {', '.join(map(repr, names))} is",
                param="model",
                code="model_not_found",
            )
