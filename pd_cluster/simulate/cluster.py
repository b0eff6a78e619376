"""A whole cluster in virtual time: the real coordinator state around simulated workers.

The gateway is the simulation itself: it asks for placements, starts attempts, tries again what was
refused or retracted, and notes when tokens come.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pd_cluster.config import Config
from pd_cluster.coordinator.costs import Priors
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.prefix_hash import block_hashes, pack_hashes
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.coordinator.state import Answer, CoordinatorState
from pd_cluster.simulate.clock import Clock
from pd_cluster.simulate.hardware import StepTimes
from pd_cluster.simulate.trace import TraceRequest
from pd_cluster.simulate.worker import FOREVER, MESSAGE_S, SimulatedWorker
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    IntArray,
    MakeRoom,
    Output,
    Placement,
    PlaceRequest,
    Role,
    SamplingParams,
    Sources,
    StartAttempt,
    WorkerId,
    pack_ints,
)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`num_pages` of each worker, and `host_pages` of the tier below, 0 for none; `page_size` and
    `chunk_tokens` in tokens.
    """

    prefill: int
    decode: int
    num_pages: int
    page_size: int
    max_running: int = 256
    chunk_tokens: int = 8192
    local_tokens: int = 512
    heartbeat_s: float = 1.0
    host_pages: int = 0


@dataclass(slots=True)
class Request:
    """What became of one request of the trace. Times are virtual seconds, -1 for not yet."""

    trace: TraceRequest
    arrival: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    tokens: int = 0
    attempts: int = 0
    retractions: int = 0
    resident: int = 0
    sources: Sources = field(default_factory=Sources)
    rejected: str = ""


class Simulation:
    """Runs a trace to its end: `run()`, then look at `requests`, `gaps` and the workers.

    `gaps` are the times between two tokens of one request, in seconds, for all requests.
    `timed`, where given, is a clock for real time: then `placing_s` is what the coordinator took.
    """

    def __init__(
        self,
        trace: list[TraceRequest],
        shape: ClusterShape,
        times: StepTimes,
        scheduling: Scheduling,
        timed: Callable[[], float] | None = None,
    ) -> None:
        self.clock = Clock()
        self.shape = shape
        self.requests = [Request(each) for each in trace]
        self.gaps = array("d")
        self.placing_s = 0.0
        self.state = CoordinatorState(
            # The page size stands beside the config: traces have larger pages than it allows.
            Config(
                max_queued_requests=len(trace),
                max_running_requests=shape.max_running,
                placement="least_loaded",
            ),
            scheduling,
            page_size=shape.page_size,
        )
        self.workers = {
            worker.id: worker
            for role in ("prefill", "decode")
            for worker in self._start(role, times)
        }
        self._next: dict[int, list[int]] = {}
        self._open = len(trace)
        self._timed = timed
        self._wake_at = float("inf")

    def run(self) -> None:
        for number, request in enumerate(self.requests):
            after = request.trace.after
            if after is None:
                self.clock.at(request.trace.arrival, self._arriver(number))
            else:
                self._next.setdefault(after, []).append(number)
        for index, worker in enumerate(self.workers.values()):
            self.state.report(worker.report(), 0.0)
            # Heartbeats are spread over their period, as they are in life.
            offset = self.shape.heartbeat_s * (index + 1) / len(self.workers)
            self.clock.at(offset, self._heart(worker))
        while self._open and self.clock.step():
            pass
        assert not self._open, "requests are left and nothing more can happen"

    # --- what the workers reach ---

    def find(self, worker: WorkerId) -> SimulatedWorker:
        return self.workers[worker]

    def answer_token(self, request: str) -> int:
        return self.requests[int(request)].trace.answer_token

    def kv_events(self, update: KvUpdate) -> bool:
        return self.state.kv_events(update, self.clock.now)

    def deliver(self, output: Output) -> None:
        request = self.requests[int(output.attempt.request)]
        now = self.clock.now
        if output.tokens:
            if request.tokens:
                self.gaps.append(now - request.last_token)
            else:
                request.first_token = now
                request.resident = output.resident
                assert output.sources is not None, "sources come with the first token"
                request.sources = output.sources
            request.tokens += len(output.tokens)
            request.last_token = now
        if output.outcome is not None:
            self._ended(request, output)

    def deliver_each(self, requests: list[str], times: NDArray[np.float64]) -> None:
        between = np.diff(times).tobytes()
        first, last = float(times[0]), float(times[-1])
        for name in requests:
            request = self.requests[int(name)]
            assert request.tokens, "the first token is delivered by itself"
            self.gaps.append(first - request.last_token)
            self.gaps.frombytes(between)
            request.tokens += len(times)
            request.last_token = last

    # --- within ---

    def _start(self, role: Role, times: StepTimes) -> list[SimulatedWorker]:
        shape = self.shape
        return [
            SimulatedWorker(
                f"{role}-{index}",
                role,
                self.clock,
                self,
                times,
                num_pages=shape.num_pages,
                host_pages=shape.host_pages,
                page_size=shape.page_size,
                max_running=shape.max_running,
                chunk_tokens=shape.chunk_tokens,
                local_tokens=shape.local_tokens,
            )
            for index in range(shape.prefill if role == "prefill" else shape.decode)
        ]

    def _arriver(self, number: int) -> Callable[[], None]:
        def arrive() -> None:
            self.requests[number].arrival = self.clock.now
            self._ask(number)

        return arrive

    def _ask(self, number: int, avoid: tuple[WorkerId, ...] = ()) -> None:
        """One more attempt at a request, after the tokens that it has."""
        request = self.requests[number]
        tokens = self._tokens(request)
        hashes = block_hashes(tokens, self.state.cluster.prefill.index.block)
        place = PlaceRequest(
            attempt=AttemptId(str(number), request.attempts),
            gateway="gateway-0",
            prompt_len=len(tokens),
            max_tokens=request.trace.max_tokens - request.tokens,
            timeout_s=FOREVER,
            resumed=request.attempts > 0,
            retractions=request.retractions,
            priority=request.trace.priority,
            avoid=avoid,
            blocks=pack_hashes(hashes),
        )
        request.attempts += 1
        self._coordinate(lambda: self.state.place(place, self.clock.now))

    def _tokens(self, request: Request) -> IntArray:
        prompt = request.trace.tokens()
        sent = np.full(request.tokens, request.trace.answer_token, np.int32)
        return np.concatenate([prompt, sent])

    def _coordinate(self, call: Callable[[], list[Answer]]) -> None:
        started = self._timed() if self._timed else 0.0
        answers = call()
        if self._timed:
            self.placing_s += self._timed() - started
        for worker, order in self.state.take_orders():
            self.clock.after(MESSAGE_S, partial(self._make_room, self.workers[worker], order))
        for answer in answers:
            if isinstance(answer.reply, Placement):
                self._place(answer.reply)
            else:
                request = self.requests[int(answer.attempt.request)]
                request.rejected = answer.reply.reason
                self._done(int(answer.attempt.request))
        wake_at = self.state.wake_at
        if wake_at < self._wake_at:
            self._wake_at = wake_at
            self.clock.at(wake_at, self._wake)

    def _wake(self) -> None:
        self._wake_at = float("inf")
        self._coordinate(lambda: self.state.tick(self.clock.now))

    def _place(self, placement: Placement) -> None:
        number = int(placement.attempt.request)
        request = self.requests[number]
        start = StartAttempt(
            attempt=placement.attempt,
            gateway="gateway-0",
            prefill=placement.prefill,
            tokens=pack_ints(self._tokens(request)),
            prompt_len=request.trace.prompt_len,
            params=SamplingParams(
                max_tokens=request.trace.max_tokens, temperature=0.0, ignore_eos=True
            ),
            timeout_s=FOREVER,
            route=placement.route,
            priority=request.trace.priority,
            retractions=request.retractions,
        )
        decode = self.workers[placement.decode]
        self.clock.after(MESSAGE_S, lambda: decode.handle(start))

    def _ended(self, request: Request, output: Output) -> None:
        attempt, outcome = output.attempt, output.outcome
        assert outcome is not None
        number = int(attempt.request)
        request.retractions += outcome == "retracted"
        lease = self.state.leases.get(attempt)
        ended = AttemptEnded(attempt=attempt, outcome=outcome)
        self._coordinate(lambda: self.state.ended(ended, self.clock.now))
        if outcome == "finished":
            self._done(number)
            return
        if outcome == "retracted" and lease is not None:
            self._report(self.workers[lease.placement.decode])  # there is room
        avoid = (lease.placement.decode,) if lease and outcome == "refused" else ()
        self.clock.after(MESSAGE_S, lambda: self._ask(number, avoid))

    def _done(self, number: int) -> None:
        self._open -= 1
        for other in self._next.pop(number, ()):
            self.clock.after(self.requests[other].trace.arrival, self._arriver(other))

    def _make_room(self, worker: SimulatedWorker, order: MakeRoom) -> None:
        worker.handle(order)
        self._report(worker)

    def _report(self, worker: SimulatedWorker) -> None:
        reply, answers = self.state.report(worker.report(), self.clock.now)
        worker.scheduler.decode.retraction_policy = reply.retraction_policy
        self._coordinate(lambda: answers)

    def _heart(self, worker: SimulatedWorker) -> Callable[[], None]:
        def beat() -> None:
            self.state.measured(worker.id, worker.take_measured())
            self._report(worker)
            self.clock.after(self.shape.heartbeat_s, beat)

        return beat


def priors(times: StepTimes) -> Priors:
    """What the cost model should believe of this hardware before anything is measured."""
    return Priors(
        prefill=times.prefill_prior(),
        decode=times.decode_prior(),
        link_latency_s=times.hardware.nic_latency_s,
        link_bytes_per_s=times.hardware.nic_bandwidth,
        kv_bytes_per_token=times.model.kv_bytes_per_token,
        host=(1e-5, times.model.kv_bytes_per_token / times.hardware.host_bandwidth),
    )
