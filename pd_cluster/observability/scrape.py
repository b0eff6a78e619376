"""The cluster's metrics endpoint: asks every process when it is scraped, and waits for none of them
for long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from ray.exceptions import RayError

from pd_cluster.observability.collector import ClusterCollector
from pd_cluster.observability.ledger import Ledger
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    GatewaySnapshot,
    WorkerSnapshot,
)
from pd_cluster.peers import Peers

logger = logging.getLogger(__name__)

# Whoever has not answered by then is left out (seconds); Prometheus gives up after ten.
DEADLINE_S = 3.0
# A worker answers between two steps: it is not lost for one heartbeat that is late.
LOST_HEARTBEATS = 10
BIND_AGAIN_S = 5.0


class MetricsEndpoint:
    """An HTTP server on `host` and `port` (0: any) that serves /metrics from threads of its own.

    `coordinator` gives the coordinator's own snapshot, and `gateways` the names of those that
    there should be, from any thread. Where the port is taken it
    tries again until it is not. `url` is None until then.
    """

    def __init__(
        self,
        peers: Peers,
        coordinator: Callable[[], CoordinatorSnapshot],
        *,
        host: str,
        port: int,
        gateways: Callable[[], Sequence[str]],
        model: str,
        heartbeat_s: float,
    ) -> None:
        self.workers: Ledger[WorkerSnapshot] = Ledger()
        self.url: str | None = None
        self._peers = peers
        self._coordinator = coordinator
        self._gateways = gateways
        self._registry = CollectorRegistry()
        self._registry.register(
            ClusterCollector(
                self._ask,
                self.workers,
                Ledger(),
                model=model,
                lost_after_s=LOST_HEARTBEATS * heartbeat_s,
            )
        )
        threading.Thread(target=self._serve, args=(host, port), name="metrics", daemon=True).start()

    def _serve(self, host: str, port: int) -> None:
        while self.url is None:
            try:
                server, _ = start_http_server(port, host, self._registry)
                self.url = f"http://{host}:{server.server_port}/metrics"
            except OSError as error:
                logger.warning("metrics: cannot listen on %s:%s: %s", host, port, error)
                time.sleep(BIND_AGAIN_S)

    def _ask(self) -> ClusterSnapshot:
        coordinator = self._coordinator()
        workers = [
            self._question(each.worker.name, "snapshot", each.worker.incarnation)
            for each in coordinator.workers
        ]
        names = self._gateways()
        gateways = [self._question(name, "metrics_snapshot") for name in names]
        asked = [each for each in (*workers, *gateways) if each is not None]
        wait(asked, timeout=DEADLINE_S)
        answers = [_answer(each) for each in asked]
        answered = tuple(each for each in answers if isinstance(each, GatewaySnapshot))
        return ClusterSnapshot(
            coordinator=coordinator,
            workers=tuple(each for each in answers if isinstance(each, WorkerSnapshot)),
            gateways=answered,
            silent_gateways=len(names) - len(answered),
        )

    def _question(self, name: str, question: str, life: str = "") -> Future[Any] | None:
        try:
            asked: Future[Any] = getattr(self._peers.handle(name, life), question).remote().future()
        except (ValueError, RayError):
            self._peers.forget(name, life)
            return None
        return asked


def _answer(question: Future[Any]) -> Any:
    """None where there is none, or an error."""
    if not question.done():
        question.cancel()
        return None
    return None if question.exception() is not None else question.result()
