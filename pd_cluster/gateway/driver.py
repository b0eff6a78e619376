"""Runs requests: carries out the instructions of their states over a link to the cluster.

Belongs to one asyncio loop; nothing here may be called from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self, assert_never

import numpy as np
from msgspec import structs

from pd_cluster.config import Config
from pd_cluster.coordinator.index import BLOCK_TOKENS
from pd_cluster.coordinator.prefix_hash import block_hashes, pack_hashes
from pd_cluster.errors import InvalidTransition, RequestError, Unavailable
from pd_cluster.gateway.backend import Generated, GenerateRequest
from pd_cluster.gateway.instructions import (
    Cancel,
    ClientGone,
    DeadlinePassed,
    Delivered,
    DrainExpired,
    Emit,
    EndAttempt,
    Event,
    Finish,
    Instruction,
    Place,
    Placed,
    Rejected,
    Started,
    StopStringFound,
    Submit,
    SubmitFailed,
    Usage,
    WorkerLost,
)
from pd_cluster.gateway.request import RequestState
from pd_cluster.gateway.stories import Stories
from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    OutputBatch,
    Placement,
    PlaceRequest,
    Rejection,
    StartAttempt,
    WorkerId,
)

logger = logging.getLogger(__name__)

# Between two questions to a coordinator that cannot be reached.
ASK_AGAIN_S = 0.2


class ClusterLink(Protocol):
    """How a gateway reaches the coordinator and the decode workers."""

    async def place(self, request: PlaceRequest) -> Placement | Rejection:
        """Raises Unavailable where the coordinator cannot be reached; it will be asked again."""
        ...

    def post(self, worker: WorkerId, message: StartAttempt | CancelAttempt) -> None:
        """Sends without waiting. Messages may overtake each other.

        Raises Unavailable where the worker is known to be gone.
        """
        ...

    def attempt_ended(self, message: AttemptEnded) -> None:
        """Sends without waiting; also withdraws an attempt that still waits for a placement."""
        ...


class Driver:
    """All running requests of one gateway."""

    def __init__(
        self,
        link: ClusterLink,
        config: Config,
        metrics: GatewayMetrics,
        *,
        name: str = "gateway",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.config = config
        self.metrics = metrics
        self.name = name
        self.clock = clock
        self._running: dict[str, RunningRequest] = {}
        self._stories = Stories(config.recent_requests)
        metrics.watch_gateway(self.count_running, self.count_waiting, self.count_retracted)

    def generate(self, request: GenerateRequest) -> RunningRequest:
        """The request, to be entered as a context; its id must be new."""
        return RunningRequest(self, request)

    def deliver(self, batch: OutputBatch) -> None:
        """What a decode worker sent. Outputs of requests that are over are dropped."""
        for output in batch.outputs:
            if running := self._running.get(output.attempt.request):
                running.feed(Delivered(batch.worker, output))

    def worker_lost(self, worker: WorkerId) -> None:
        """A decode worker died: its requests go on elsewhere."""
        for running in list(self._running.values()):
            running.feed(WorkerLost(worker))

    def submit_failed(self, attempt: AttemptId, reason: str) -> None:
        """A StartAttempt that was posted did not arrive."""
        if running := self._running.get(attempt.request):
            running.feed(SubmitFailed(attempt, reason))

    def count_running(self) -> int:
        return sum(each.state.state in ("running", "draining") for each in self._running.values())

    def count_waiting(self) -> int:
        return sum(each.state.state == "placing" for each in self._running.values())

    def count_retracted(self) -> int:
        """Of those that wait."""
        return sum(
            each.state.state == "placing" and each.state.retracted
            for each in self._running.values()
        )

    def stories(self, request_id: str) -> list[dict[str, Any]]:
        """What became of each sequence of a request, running or recent; empty: not known."""
        running = [each.state for each in self._running.values()]
        return self._stories.find(request_id, running, self.clock())

    def close(self) -> None:
        """Aborts every request; their clients get an error."""
        for running in list(self._running.values()):
            running.feed(ClientGone())

    def enter(self, running: RunningRequest) -> None:
        request_id = running.state.request_id
        assert request_id not in self._running, f"request id {request_id} is in use"
        self._running[request_id] = running

    def leave(self, running: RunningRequest) -> None:
        if self._running.pop(running.state.request_id, None):
            self._stories.keep(running.state)


class RunningRequest:
    """One request under way: a Generation (backend.py)."""

    def __init__(self, driver: Driver, request: GenerateRequest) -> None:
        self._driver = driver
        self._arrival = request.arrival
        limit, name = driver.config.timeouts.request_s, "timeouts.request_s"
        if request.timeout_s is not None and request.timeout_s < limit:
            limit, name = request.timeout_s, "timeout"
        self._deadline = request.arrival + limit
        self.state = RequestState(
            request.request_id,
            request.prompt,
            request.params,
            gateway=driver.name,
            now=driver.clock(),
            deadline=self._deadline,
            max_attempts=driver.config.max_attempts,
            end_token_ids=request.end_token_ids,
            namespace=request.namespace,
            sequence=request.sequence,
            priority=request.standing.priority,
            tenant=request.standing.tenant,
            routing_key=request.standing.routing_key,
            time_limit=f"{name} ({limit:g} s)",
        )
        self._namespace = request.namespace
        self._results: asyncio.Queue[Generated | Finish] = asyncio.Queue()
        self._over = False
        self._placing: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._last_token_at: float | None = None

    # --- the client's side -----------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self.state.usage

    def stop(self) -> None:
        self.feed(StopStringFound())

    async def __aenter__(self) -> Self:
        self._driver.enter(self)
        self._set_timer(self._deadline - self._driver.clock(), DeadlinePassed())
        self.feed(Started())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.feed(ClientGone())

    def __aiter__(self) -> AsyncIterator[Generated]:
        return self

    async def __anext__(self) -> Generated:
        if self._over:
            raise StopAsyncIteration
        result = await self._results.get()
        if isinstance(result, Generated):
            return result
        self._over = True
        if result.end == "finished":
            return Generated((), result.reason)
        raise result.error or Unavailable(
            "the gateway is shutting down", code="shutting_down", retry_after=1.0
        )

    # --- the cluster's side ----------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        try:
            instructions = self.state.handle(event, self._driver.clock())
        except InvalidTransition as error:
            # Our bug; the client gets an answer all the same.
            logger.exception("request %s", self.state.request_id)
            self._results.put_nowait(self._broken(error))
            self._leave()
            return
        for instruction in instructions:
            self._carry_out(instruction)
        if self.state.ended:
            self._leave()

    def _leave(self) -> None:
        self._driver.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def _broken(self, error: InvalidTransition) -> Finish:
        answer = RequestError(f"internal error: {type(error).__name__}", code="internal_error")
        return Finish(end="failed", usage=self.state.usage, error=answer)

    def _carry_out(self, instruction: Instruction) -> None:
        driver = self._driver
        match instruction:
            case Place(request, delay_s):
                self._asked_at = driver.clock()
                asked = structs.replace(request, blocks=self._blocks())
                self._placing = asyncio.create_task(self._place(asked, delay_s))
            case Submit(worker, message):
                driver.metrics.stage("queue", driver.clock() - self._asked_at)
                try:
                    driver.link.post(worker, message)
                except Unavailable as error:
                    self.feed(SubmitFailed(message.attempt, error.message))
            case Cancel(worker, cancel):
                try:
                    driver.link.post(worker, cancel)
                except Unavailable:
                    # Nothing is left to cancel.
                    self.feed(WorkerLost(worker))
            case EndAttempt(ended):
                if self._placing is not None:
                    self._placing.cancel()
                driver.link.attempt_ended(ended)
            case Emit(tokens, logprobs, scores):
                self._observe_tokens(len(tokens))
                generated = Generated(tokens, logprobs=logprobs, prompt_scores=scores)
                self._results.put_nowait(generated)
            case Finish():
                self._observe_finish(instruction)
                self._results.put_nowait(instruction)
                if not self.state.ended:
                    self._set_timer(driver.config.timeouts.drain_s, DrainExpired())
            case _:
                assert_never(instruction)

    def _blocks(self) -> bytes:
        """What placement is told of the tokens: nothing where caches will not be looked at."""
        if self.state.params.prompt_logprobs >= 0:
            return b""
        block = max(BLOCK_TOKENS, self._driver.config.page_size)
        tokens = np.array((*self.state.prompt, *self.state.tokens), np.int32)
        return pack_hashes(block_hashes(tokens, block, self._namespace))

    async def _place(self, request: PlaceRequest, delay_s: float) -> None:
        try:
            if delay_s:  # else those that came together would all be read before one is placed
                await asyncio.sleep(delay_s)
            answer = await self._ask(request)
        except Exception as error:
            logger.exception("request %s: no placement", request.attempt)
            answer = Rejection(
                attempt=request.attempt,
                status=503,
                reason="internal_error",
                message=f"no placement: {type(error).__name__}: {error}",
                retry_after_s=1.0,
            )
        self._placing = None
        self.feed(Placed(answer) if isinstance(answer, Placement) else Rejected(answer))

    async def _ask(self, request: PlaceRequest) -> Placement | Rejection:
        while True:
            try:
                return await self._driver.link.place(request)
            except Unavailable:
                # The request's deadline ends this: streams go on while a coordinator restarts.
                await asyncio.sleep(ASK_AGAIN_S)

    def _set_timer(self, delay_s: float, event: Event) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.feed, event)

    # --- accounts --------------------------------------------------------------------------------

    def _observe_tokens(self, count: int) -> None:
        now, metrics = self._driver.clock(), self._driver.metrics
        if self._last_token_at is None:
            metrics.first_token(now - self._arrival, len(self.state.prompt), self.state.sources)
        else:
            metrics.next_tokens(now - self._last_token_at)
        metrics.generated(count)
        self._last_token_at = now

    def _observe_finish(self, finish: Finish) -> None:
        reason = finish.reason or ("error" if finish.end == "failed" else "abort")
        recovered = finish.recovered if finish.end == "finished" else ()
        self._driver.metrics.finished(reason, self._driver.clock() - self._arrival, recovered)
