"""The coordinator as a Ray actor: a thin shell around `CoordinatorState`."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec
import ray

from pd_cluster.config import Config
from pd_cluster.coordinator.state import Answer, CoordinatorState
from pd_cluster.coordinator.wire import decode_update
from pd_cluster.coordinator.wishes import Wishes
from pd_cluster.mail import Mail
from pd_cluster.nodes import attach
from pd_cluster.observability.scrape import MetricsEndpoint
from pd_cluster.observability.snapshots import (
    CoordinatorSnapshot,
    WorkerSnapshot,
    WorkerStatus,
)
from pd_cluster.peers import COORDINATOR, ClusterSpec, Peers
from pd_cluster.scaling import Order, Refusal, ScalingStatus, Wish
from pd_cluster.startup import freeze_heap
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CacheNews,
    CacheNewsTaken,
    Placement,
    PlaceRequest,
    Rejection,
    WorkerReport,
    decode,
    encode,
)

# Placements may wait; ends, reports and questions have event loops of their own beside them.
COORDINATOR_GROUPS = {"place": 100_000, "ends": 1000, "reports": 1000}
TICK_S = 0.25
# A wish to scale is taken or refused within this time (seconds).
WISH_S = 15.0


class CoordinatorActor:
    """Places attempts; not on the data path. Its state is rebuilt from reports when it restarts."""

    def __init__(self, spec: ClusterSpec) -> None:
        config = self._config = Config.model_validate_json(spec.config)
        self.state = CoordinatorState(config)
        host = attach(config, local=spec.local).host
        self.mail = Mail(COORDINATOR, host, spec.secret, self._arrived)
        self.peers = Peers(config.cluster_name, self.mail)
        # Notified when the state may want to be woken earlier than at the next tick.
        self._lock = threading.Condition()
        self._waiting: dict[AttemptId, list[Future[Placement | Rejection]]] = {}
        self.wishes = Wishes()
        self.metrics = None
        if config.metrics_port is not None:
            self.metrics = MetricsEndpoint(
                self.peers,
                self._snapshot,
                host=config.host,
                port=config.metrics_port,
                gateways=self._gateways,
                model=config.served_model_name or spec.model_id,
                heartbeat_s=config.timeouts.heartbeat_s,
            )
        freeze_heap()
        threading.Thread(target=self._tick_forever, name="tick", daemon=True).start()

    @ray.method(concurrency_group="place")
    async def place(self, data: bytes) -> bytes:
        """PlaceRequest → Placement or Rejection. Comes back when there is room, or never will
        be.
        """
        reply = await asyncio.wrap_future(self._place(decode(data, PlaceRequest)))
        return encode(reply)

    def _place(self, request: PlaceRequest) -> Future[Placement | Rejection]:
        answer: Future[Placement | Rejection] = Future()
        with self._lock:
            self._waiting.setdefault(request.attempt, []).append(answer)
            self._answer(self.state.place(request, time.monotonic()))
        return answer

    @ray.method(concurrency_group="ends")
    async def ended(self, data: bytes) -> None:
        """AttemptEnded."""
        self._ended(decode(data, AttemptEnded))

    @ray.method(concurrency_group="reports")
    async def mail_address(self) -> tuple[str, int]:
        """Where the coordinator takes mail."""
        return self.mail.address

    @ray.method(concurrency_group="reports")
    async def watch(self) -> None:
        """Never returns: it fails when this life of the coordinator is over."""
        await asyncio.Event().wait()

    def _arrived(self, data: bytes) -> None:
        """By mail: what `place`, `ended` and `kv_events` are told too."""
        message = decode(data, (PlaceRequest, AttemptEnded, CacheNews))
        match message:
            case AttemptEnded():
                self._ended(message)
            case CacheNews():
                taken = CacheNewsTaken(
                    number=message.number, follows=self._kv_events(message.update)
                )
                self.peers.post(message.worker, taken, lambda: None)
            case PlaceRequest(gateway=gateway):

                def tell(answer: Future[Placement | Rejection]) -> None:
                    self.peers.deliver(gateway, answer.result(), lambda: None)

                self._place(message).add_done_callback(tell)

    def _ended(self, event: AttemptEnded) -> None:
        with self._lock:
            self._answer(self.state.ended(event, time.monotonic()))
            withdrawn = Rejection(
                attempt=event.attempt, status=503, reason="withdrawn", message="withdrawn"
            )
            self._answer([Answer(event.attempt, withdrawn)])

    @ray.method(concurrency_group="reports")
    async def report(self, data: bytes, counted: WorkerSnapshot) -> bytes:
        """WorkerReport → ReportReply. What the worker has counted is kept should it die."""
        report = decode(data, WorkerReport)
        if self.metrics is not None:
            self.metrics.workers.observe(counted)
        with self._lock:
            reply, answers = self.state.report(report, time.monotonic())
            self._answer(answers)
        if reply.error is None:
            self.peers.watch(report.worker, lambda: self._worker_lost(report))
        return encode(reply)

    @ray.method(concurrency_group="reports")
    async def order(self, data: bytes) -> bytes:
        """Order → News, for who starts and ends the workers: `cluster.py`."""
        order = msgspec.msgpack.decode(data, type=Order)
        with self._lock:
            self._answer(self.state.set_draining(order.draining, time.monotonic()))
            placed = {name: len(each.placed) for name, each in self.state.workers.items()}
        return msgspec.msgpack.encode(self.wishes.order(order, placed))

    @ray.method(concurrency_group="reports")
    async def wish(self, data: bytes) -> bytes:
        """Wish → ScalingStatus once it was taken, or Refusal."""
        answered: asyncio.Future[ScalingStatus | Refusal] = asyncio.Future()

        def answer(reply: ScalingStatus | Refusal) -> None:
            if not answered.done():
                answered.set_result(reply)

        self.wishes.add(msgspec.msgpack.decode(data, type=Wish), answer)
        try:
            reply = await asyncio.wait_for(answered, WISH_S)
        except TimeoutError:
            reply = Refusal(status=503, message="`pd-cluster serve` does not answer")
        return msgspec.msgpack.encode(reply)

    @ray.method(concurrency_group="reports")
    async def scaling(self) -> bytes:
        """ScalingStatus or nil, where nobody has told it yet."""
        return msgspec.msgpack.encode(self.wishes.status)

    def _gateways(self) -> list[str]:
        """Those that should answer."""
        if self.wishes.status is None:
            return [f"gateway-{index}" for index in range(self._config.gateways)]
        members = self.wishes.status.members
        return [
            name
            for name, state in members.items()
            if name.startswith("gateway-") and state in ("serving", "draining")
        ]

    @ray.method(concurrency_group="reports")
    async def snapshot(self) -> CoordinatorSnapshot:
        return self._snapshot()

    def _snapshot(self) -> CoordinatorSnapshot:
        now = time.monotonic()
        with self._lock:
            statistics = self.state.statistics
            return CoordinatorSnapshot(
                workers=tuple(
                    WorkerStatus(
                        worker=each.id,
                        role=each.report.role,
                        state=self.state.standing(each),
                        host=each.report.host,
                        silent_s=now - each.seen,
                    )
                    for each in self.state.workers.values()
                ),
                lost=tuple(
                    WorkerStatus(worker=each.worker, role=each.role, state="lost")
                    for each in self.state.lost.values()
                ),
                waiting=len(self.state.waiting),
                running=len(self.state.leases),
                placements={"remote": 0, **statistics.routes},
                rejections=dict(statistics.rejections),
                attempts=dict(statistics.outcomes),
                leases_expired=statistics.leases_expired,
                metrics_url=None if self.metrics is None else self.metrics.url,
            )

    @ray.method(concurrency_group="reports")
    async def kv_events(self, data: bytes) -> bool:
        """`encode_update` → whether it follows what is known; if not, send a snapshot."""
        return self._kv_events(data)

    def _kv_events(self, data: bytes) -> bool:
        update, measured = decode_update(data)
        with self._lock:
            self.state.measured(update.worker, measured)
            return self.state.kv_events(update, time.monotonic())

    @ray.method(concurrency_group="reports")
    async def explain(self, request: str, number: int) -> dict[str, Any] | None:
        """Why an attempt was placed where it was; None if it is not known, or no longer."""
        with self._lock:
            return self.state.explain(AttemptId(request, number))

    def _worker_lost(self, report: WorkerReport) -> None:
        with self._lock:
            self._answer(self.state.worker_lost(report.worker, time.monotonic()))

    def _tick_forever(self) -> None:
        while True:
            with self._lock:
                due = time.monotonic() + TICK_S
                while (left := min(due, self.state.wake_at) - time.monotonic()) > 0:
                    self._lock.wait(left)
                self._answer(self.state.tick(time.monotonic()))

    def _answer(self, answers: list[Answer]) -> None:
        for worker, order in self.state.take_orders():
            self.peers.post(worker, order, lambda: None)
        for answer in answers:
            for future in self._waiting.pop(answer.attempt, []):
                if not future.done():
                    future.set_result(answer.reply)
        self._lock.notify_all()
