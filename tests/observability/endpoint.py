"""The cluster's endpoint in this process: what it shows of snapshots that are given to it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from pd_cluster.observability.collector import ClusterCollector
from pd_cluster.observability.ledger import Ledger
from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    GatewaySnapshot,
    WorkerSnapshot,
)
from pd_cluster.types import WorkerId
from tests.observability.samples import Samples, parse

DECODE = WorkerId("decode-0", "b")


def worker(**fields) -> WorkerSnapshot:
    values = {"worker": DECODE, "role": "decode", "capacity": 100, "free": 100, "number": 1}
    return WorkerSnapshot(**{**values, **fields})


class Endpoint:
    """What is shown of the snapshots that are given to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers: Ledger[WorkerSnapshot] = Ledger()
        gateways: Ledger[GatewaySnapshot] = Ledger()
        self._snapshot = ClusterSnapshot()
        self._registry = CollectorRegistry()
        self._registry.register(
            ClusterCollector(
                lambda: self._snapshot,
                self.workers,
                gateways,
                model="tiny",
                lost_after_s=10.0,
                clock=lambda: self.now,
            )
        )

    def text(self, **parts) -> str:
        self._snapshot = ClusterSnapshot(**parts)
        return generate_latest(self._registry).decode()

    def show(self, *workers: WorkerSnapshot, **parts) -> Samples:
        return parse(self.text(workers=workers, **parts).encode())


def every_metric() -> set[str]:
    """Names of all samples that the endpoint can show."""
    gateway = GatewayMetrics("tiny")
    found = Endpoint().show(
        worker(
            host_tokens={"free": 1},
            **{
                f"tier_{kind}_{what}": {"host": 1}
                for kind in ("loaded", "stored")
                for what in ("tokens", "bytes")
            },
        ),
        coordinator=CoordinatorSnapshot(),
        gateways=(gateway.snapshot(),),
    )
    return {name for name, _ in found} | {"pd_request_stage_seconds_bucket"}
