"""The gateway as a Ray actor: an HTTP server whose requests run over the cluster's other actors."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import msgspec
import ray
import uvicorn
from ray.exceptions import RayError

from pd_cluster.config import Config
from pd_cluster.errors import StartError, Unavailable
from pd_cluster.gateway.app import create_app
from pd_cluster.gateway.backend import GenerateRequest, ModelInfo
from pd_cluster.gateway.driver import Driver, RunningRequest
from pd_cluster.gateway.gate import Gate
from pd_cluster.mail import Mail
from pd_cluster.model.config import load_config
from pd_cluster.model.generation import default_sampling
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.nodes import advertised_host, attach, model_folder, node_address
from pd_cluster.observability.logs import log_as_json
from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    GatewaySnapshot,
    WorkerSnapshot,
)
from pd_cluster.peers import COORDINATOR, ClusterSpec, Peers
from pd_cluster.scaling import Refusal, ScalingStatus, Wish
from pd_cluster.startup import freeze_heap, go_ahead
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    OutputBatch,
    Placement,
    PlaceRequest,
    Rejection,
    Role,
    StartAttempt,
    WorkerId,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

# A worker that does not answer a question of the operator's within this time is left out (seconds).
QUESTION_S = 5.0
# Of a request with very many attempts the last ones are explained.
EXPLAINED_ATTEMPTS = 16


class RayLink:
    """ClusterLink and the operator's questions, over Ray's handles. Belongs to one asyncio loop."""

    def __init__(self, peers: Peers, loop: asyncio.AbstractEventLoop) -> None:
        self.peers = peers
        self.loop = loop
        self.driver: Driver | None = None
        # Those that wait for the coordinator's answer.
        self._asked: dict[AttemptId, asyncio.Future[Placement | Rejection]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def place(self, request: PlaceRequest) -> Placement | Rejection:
        answer: asyncio.Future[Placement | Rejection] = self.loop.create_future()
        self._asked[request.attempt] = answer
        self.peers.watch_coordinator(partial(self._soon, self._coordinator_lost))
        by_call = partial(self._soon, self._place_by_call, request)
        self.peers.tell_coordinator(request, by_call)
        try:
            return await answer
        finally:
            if self._asked.get(request.attempt) is answer:
                del self._asked[request.attempt]

    def answered(self, answer: Placement | Rejection) -> None:
        """What the coordinator says of an attempt; nobody may want to know any more."""
        asked = self._asked.get(answer.attempt)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def _place_by_call(self, request: PlaceRequest) -> None:
        async def call() -> None:
            try:
                reply = await self.peers.handle(COORDINATOR).place.remote(encode(request))
            except (ValueError, RayError) as error:
                self.peers.forget(COORDINATOR)
                self._unanswered(request.attempt, str(error))
                return
            self.answered(decode(reply, (Placement, Rejection)))

        task = self.loop.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _coordinator_lost(self) -> None:
        for attempt in list(self._asked):
            self._unanswered(attempt, "it ended")

    def _unanswered(self, attempt: AttemptId, why: str) -> None:
        asked = self._asked.get(attempt)
        if asked is not None and not asked.done():
            asked.set_exception(Unavailable(f"the coordinator cannot be reached: {why}"))

    def post(self, worker: WorkerId, message: StartAttempt | CancelAttempt) -> None:
        lost = partial(self._soon, self._worker_lost, worker)
        self.peers.watch(worker, lost)
        self.peers.post(worker, message, lost)

    def attempt_ended(self, message: AttemptEnded) -> None:
        def by_call() -> None:
            try:
                self.peers.handle(COORDINATOR).ended.remote(encode(message))
            except (ValueError, RayError):
                # Workers' reports will tell a restarted coordinator what is still running.
                self.peers.forget(COORDINATOR)

        self.peers.tell_coordinator(message, by_call)

    async def snapshot(self) -> ClusterSnapshot:
        try:
            coordinator: CoordinatorSnapshot = await asyncio.wait_for(
                self.peers.handle(COORDINATOR).snapshot.remote(), QUESTION_S
            )
        except (ValueError, RayError, TimeoutError):
            self.peers.forget(COORDINATOR)
            return ClusterSnapshot()
        asked = [self._ask(status.worker, "snapshot") for status in coordinator.workers]
        answers = await asyncio.gather(*asked)
        workers = tuple(each for each in answers if isinstance(each, WorkerSnapshot))
        return ClusterSnapshot(coordinator=coordinator, workers=workers)

    async def wish(self, wish: Wish) -> ScalingStatus | Refusal:
        reply = await self._ask_coordinator("wish", msgspec.msgpack.encode(wish))
        answer: ScalingStatus | Refusal = msgspec.msgpack.decode(
            reply, type=ScalingStatus | Refusal
        )
        return answer

    async def scaling(self) -> ScalingStatus | None:
        reply = await self._ask_coordinator("scaling")
        status: ScalingStatus | None = msgspec.msgpack.decode(reply, type=ScalingStatus | None)
        return status

    async def _ask_coordinator(self, question: str, *args: bytes) -> bytes:
        try:
            reply: bytes = await getattr(self.peers.handle(COORDINATOR), question).remote(*args)
        except (ValueError, RayError) as error:
            self.peers.forget(COORDINATOR)
            raise Unavailable(
                f"the coordinator cannot be reached: {error}", retry_after=1.0
            ) from error
        return reply

    async def flush(self, role: Role | None) -> dict[str, Any]:
        snapshot = await self.snapshot()
        workers = snapshot.coordinator.workers if snapshot.coordinator else ()
        chosen = [status.worker for status in workers if role in (None, status.role)]
        freed = await asyncio.gather(*(self._ask(worker, "flush") for worker in chosen))
        return {worker.name: tokens for worker, tokens in zip(chosen, freed, strict=True)}

    async def placements(self, sequence: str, attempts: int) -> list[dict[str, Any]]:
        numbers = range(max(1, attempts - EXPLAINED_ATTEMPTS + 1), attempts + 1)
        try:
            coordinator = self.peers.handle(COORDINATOR)
            asked = [coordinator.explain.remote(sequence, number) for number in numbers]
            found = await asyncio.wait_for(asyncio.gather(*asked), QUESTION_S)
        except (ValueError, RayError, TimeoutError):
            self.peers.forget(COORDINATOR)
            return []
        pairs = zip(numbers, found, strict=True)
        return [{"attempt": number, **reasons} for number, reasons in pairs if reasons is not None]

    async def _ask(self, worker: WorkerId, question: str) -> Any:
        """None where the worker does not answer."""
        try:
            method = getattr(self.peers.handle(worker.name, worker.incarnation), question)
            return await asyncio.wait_for(method.remote(), QUESTION_S)
        except (ValueError, RayError, TimeoutError):
            self.peers.forget(worker.name, worker.incarnation)
            return None

    def _soon(self, callback: Any, *args: Any) -> None:
        self.loop.call_soon_threadsafe(callback, *args)

    def _worker_lost(self, worker: WorkerId) -> None:
        if self.driver is not None:
            self.driver.worker_lost(worker)


class RayBackend:
    """The HTTP application's Backend."""

    def __init__(self, driver: Driver, link: RayLink) -> None:
        self.driver = driver
        self.link = link

    def generate(self, request: GenerateRequest) -> RunningRequest:
        return self.driver.generate(request)

    async def ready(self) -> str | None:
        snapshot = await self.link.snapshot()
        if snapshot.coordinator is None:
            return "the coordinator does not answer"
        workers = snapshot.coordinator.workers
        roles = {status.role for status in workers if status.state == "ready"}
        missing = [role for role in ("prefill", "decode") if role not in roles]
        return f"no {' and no '.join(missing)} worker is ready" if missing else None

    async def snapshot(self) -> ClusterSnapshot:
        return await self.link.snapshot()

    async def wish(self, wish: Wish) -> ScalingStatus | Refusal:
        return await self.link.wish(wish)

    async def scaling(self) -> ScalingStatus | None:
        return await self.link.scaling()

    async def flush(self, role: Role | None) -> dict[str, Any]:
        return await self.link.flush(role)

    def stories(self, request_id: str) -> list[dict[str, Any]]:
        return self.driver.stories(request_id)

    async def placements(self, sequence: str, attempts: int) -> list[dict[str, Any]]:
        return await self.link.placements(sequence, attempts)


class GatewayActor:
    """One HTTP server. All of it runs in the actor's one event loop."""

    def __init__(self, spec: ClusterSpec, name: str) -> None:
        config = self.config = Config.model_validate_json(spec.config)
        self.name = name
        log_as_json(name)
        folder = model_folder(spec.model_folder, config.model)
        self.tokenizer = Tokenizer(folder, config.chat_template)
        model = load_config(folder)
        context = config.context_length or model.max_positions
        self.model = ModelInfo(
            name=config.served_model_name or spec.model_id,
            context_length=min(context, model.max_positions),
            pool_capacity=config.max_total_tokens,
            kv_pool=spec.kv_pool,
            eos_token_ids=frozenset((*model.eos_token_ids, *self.tokenizer.eos_token_ids)),
            vocab_size=model.vocab_size,
            aliases=config.model_aliases,
            sampling_defaults=(
                default_sampling(folder) if config.sampling_defaults == "model" else {}
            ),
        )
        self.gate = Gate()
        self.metrics = GatewayMetrics(self.model.name, name)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url: str | None = None
        self._driver: Driver | None = None
        self._link: RayLink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        host = attach(config, local=spec.local).host
        self.mail = Mail(name, host, spec.secret, self._arrived)

    async def start(self, port: int) -> str:
        """Binds the port (0: any) and serves; the URL. StartError where the port is taken.

        Asked again, it says where it serves. So asking every now and then has a gateway that Ray
        has restarted serve again.
        """
        if self._url is not None:
            return self._url
        config = self.config
        go_ahead()
        self._loop = asyncio.get_running_loop()
        link = self._link = RayLink(Peers(config.cluster_name, self.mail), self._loop)
        driver = self._driver = Driver(link, config, self.metrics, name=self.name)
        link.driver = driver
        backend = RayBackend(driver, link)
        app = create_app(backend, self.tokenizer, self.model, config, self.metrics, self.gate)
        listener = bind(config.host, port)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(config.timeouts.shutdown_s)),
        )
        self._server = uvicorn.Server(settings)
        # Signals belong to Ray's process, not to the server in it.
        self._serving = asyncio.create_task(self._server._serve([listener]))
        while not self._server.started:
            if self._serving.done():
                raise StartError(f"the HTTP server did not start: {self._serving.exception()}")
            await asyncio.sleep(0.01)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{advertised_host(host, node_address())}:{port}"
        freeze_heap()
        return self._url

    async def watch(self) -> None:
        """Never returns: it fails when this life of the gateway is over."""
        await asyncio.Event().wait()

    async def metrics_snapshot(self) -> GatewaySnapshot:
        return self.metrics.snapshot()

    @ray.method(num_returns=0)
    async def deliver(self, data: bytes) -> None:
        """What could not come by mail."""
        self._delivered(data)

    async def mail_address(self) -> tuple[str, int]:
        """Where this gateway takes mail."""
        return self.mail.address

    def _arrived(self, data: bytes) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._delivered, data)

    def _delivered(self, data: bytes) -> None:
        if self._driver is None or self._link is None:
            return
        message = decode(data, (OutputBatch, Placement, Rejection))
        if isinstance(message, OutputBatch):
            self._driver.deliver(message)
        else:
            self._link.answered(message)

    async def inside(self) -> int:
        """How many requests are at work."""
        return self.gate.inside

    async def stop(self, wait_s: float) -> None:
        """Answers new requests with 503; running ones get `wait_s` to finish."""
        if self._server is None or self._serving is None or self._driver is None:
            return
        if not await self.gate.close(wait_s):
            self._driver.close()
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=1)
        self._server.force_exit = True
        await asyncio.wait([self._serving], timeout=5)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError, one line, where that cannot be."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
