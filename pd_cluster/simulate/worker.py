"""A worker in virtual time: the real scheduler, prefix cache and page pool, no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pd_cluster.cache.events import CacheEvent
from pd_cluster.cache.eviction import EvictionPolicy, make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_ops import CopyIn, CopyOut, TierEvent, TierOp
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.coordinator.costs import DecodeMeasured, Measured, PrefillMeasured, TierMeasured
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.draw import Drawn
from pd_cluster.simulate.clock import Clock
from pd_cluster.simulate.hardware import StepTimes, attended
from pd_cluster.simulate.quiet import WORTHWHILE, QuietSteps, count_quiet, take_in
from pd_cluster.types import Output, Role, WorkerId, WorkerReport
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Batch,
    Connect,
    Deliver,
    Event,
    Instruction,
    Notify,
    ReadPages,
    Send,
    TransferEnded,
    WritePages,
)
from pd_cluster.worker.scheduler import WorkerScheduler

# From one process to another: a message's time, and how long cache events are gathered (s).
MESSAGE_S = 0.5e-3
EVENTS_S = 20e-3
# Nothing in a simulation fails, so no state's deadline may pass.
FOREVER = 1e9


class Network(Protocol):
    """What a worker reaches of the others."""

    def find(self, worker: WorkerId) -> SimulatedWorker: ...
    def deliver(self, output: Output) -> None: ...
    def deliver_each(self, requests: list[str], times: NDArray[np.float64]) -> None:
        """A token for each request at each of the times."""

    def kv_events(self, update: KvUpdate) -> bool: ...
    def answer_token(self, request: str) -> int: ...


class SimulatedWorker:
    """`busy_s` is how long its engine computed; `nic_free` when its NIC is done (out, in).

    With `host_pages` it has a host tier, to which it writes through; 0 for none.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        clock: Clock,
        network: Network,
        times: StepTimes,
        *,
        num_pages: int,
        host_pages: int,
        page_size: int,
        max_running: int,
        chunk_tokens: int,
        local_tokens: int,
    ) -> None:
        self.id = WorkerId(name, "0")
        self.role = role
        self.times = times
        self.page_size = page_size
        self.page_bytes = page_size * times.model.kv_bytes_per_token
        self.cache = make_cache(num_pages, host_pages, page_size)
        self.scheduler = WorkerScheduler(
            self.cache,
            worker=self.id,
            agent=b"",
            region=(0, 0, 0),
            eos_token_ids=(),
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            gather=True,
            local_tokens=local_tokens,
            prefill_s=FOREVER,
            transfer_s=FOREVER,
            drain_s=FOREVER,
        )
        self.busy_s = 0.0
        self.steps = 0
        self.written_bytes = 0  # to decode workers
        self.pulled_bytes = 0  # from decode workers
        self.nic_free = [0.0, 0.0]
        self.host_free = 0.0  # when all that is copied from or to host memory is there
        self._clock = clock
        self._network = network
        self._computing = False
        self._next_event = 0
        self._events: list[CacheEvent] = []
        self._last_prefill: tuple[Batch, float] | None = None
        self._last_decode: DecodeMeasured | None = None
        self._quiet: QuietSteps | None = None  # being computed

    def handle(self, event: Event) -> None:
        self._end_quiet()
        self._obey(self.scheduler.handle(event, self._clock.now))
        self._compute()

    def report(self) -> WorkerReport:
        scheduler = self.scheduler
        return WorkerReport(
            worker=self.id,
            role=self.role,
            signature={},
            capacity=self.cache.pool.num_pages * self.page_size,
            available=self.cache.available() * self.page_size,
            running=scheduler.prefill.running + scheduler.decode.count("running"),
            waiting=scheduler.prefill.waiting + scheduler.decode.count("awaiting"),
            attempts=tuple(scheduler.decode.sequences),
            routes=("remote", "remote+pull", "local"),
        )

    @property
    def host_loaded_tokens(self) -> int:
        """That came up from its host tier, so far."""
        tiers = self.scheduler.tiers
        return 0 if tiers is None else tiers.tier_statistics().host_loaded

    def take_measured(self) -> list[Measured]:
        """The last step of each kind since the last call."""
        measured: list[Measured] = []
        if self._last_prefill is not None:
            batch, seconds = self._last_prefill
            if not batch.decode:
                tokens = sum(len(row.tokens) for row in batch.prefill)
                measured.append(PrefillMeasured(tokens, attended(batch.prefill), seconds))
        quiet = self._quiet
        if quiet is not None:
            step = min(quiet.ended(self._clock.now), len(quiet) - 1)
            if step > quiet.told:
                self._last_decode, quiet.told = quiet.measured(step), step
        if self._last_decode is not None:
            measured.append(self._last_decode)
        if isinstance(self.cache, TieredCache):
            measured += [TierMeasured(*read) for read in self.cache.take_reads()]
        self._last_prefill = self._last_decode = None
        return measured

    # --- within ---

    def _compute(self) -> None:
        """Starts the next step, if there is one and none runs."""
        if self._computing:
            return
        batch, instructions = self.scheduler.plan(self._clock.now)
        self._obey(instructions)  # also where there are none: pages may have been evicted
        if batch is None:
            if self.scheduler.resume_at > self._clock.now:
                self._clock.at(self.scheduler.resume_at, self._compute)
            return
        self._computing = True
        steps = count_quiet(self.scheduler, batch)
        if steps >= WORTHWHILE:
            self._begin_quiet(batch, steps)
            return
        seconds = self.times.step_s(batch)
        if batch.prefill:
            self._last_prefill = batch, seconds
        else:
            held = sum(row.end for row in batch.decode)
            self._last_decode = DecodeMeasured(len(batch.decode), held, seconds)
        self._begin(batch, seconds, self._clock.now + seconds)

    def _begin(self, batch: Batch, seconds: float, end: float) -> None:
        self.steps += 1
        self.busy_s += seconds
        self._clock.at(end, self._finisher(batch))

    def _begin_quiet(self, batch: Batch, steps: int) -> None:
        """Nothing changes here before all of them are over, unless the worker is told something."""
        now, held = self._clock.now, sum(row.start for row in batch.decode)
        seconds = self.times.decode_steps_s(len(batch.decode), held, steps)
        ends = np.cumsum(np.concatenate(([now], seconds)))[1:]
        sequences = [self.scheduler.decode.sequences[row.attempt] for row in batch.decode]
        quiet = self._quiet = QuietSteps(sequences, now, ends, seconds, held)
        self._last_decode = None

        def finish() -> None:
            if self._quiet is quiet:
                self._end_quiet()
                self._compute()

        self._clock.at(float(ends[-1]), finish)

    def _end_quiet(self) -> None:
        """Takes in the steps that are over; the one that is not ends as the scheduler says."""
        quiet = self._quiet
        if quiet is None:
            return
        self._quiet = None
        done = quiet.ended(self._clock.now)
        if done:
            self._take_in(quiet, done)
        last = min(done, len(quiet) - 1)
        if last > quiet.told:
            self._last_decode = quiet.measured(last)
        if done == len(quiet):
            self._computing = False
            return
        batch, instructions = self.scheduler.plan(quiet.began(done))
        assert batch is not None
        assert not instructions, "a step was not as quiet as it was taken for"
        self._begin(batch, float(quiet.seconds[done]), float(quiet.ends[done]))

    def _take_in(self, quiet: QuietSteps, steps: int) -> None:
        requests = [seq.attempt.request for seq in quiet.sequences]
        tokens = [self._network.answer_token(request) for request in requests]
        take_in(self.scheduler, quiet.sequences, tokens, steps)
        self._network.deliver_each(requests, quiet.ends[:steps])
        self.steps += steps
        # One after another, as floats add up differently otherwise.
        self.busy_s = float(np.cumsum(np.concatenate(([self.busy_s], quiet.seconds[:steps])))[-1])

    def _finisher(self, batch: Batch) -> Callable[[], None]:
        def finish() -> None:
            self._computing = False
            answer = self._network.answer_token
            drawn = [
                Drawn(answer(row.attempt.request)) for row in batch.rows if row.draw is not None
            ]
            self._obey(self.scheduler.computed(batch, drawn, self._clock.now))
            self._compute()

        return finish

    def _obey(self, instructions: list[Instruction]) -> None:
        for op in self.scheduler.take_tier_ops():
            self._copy(op)
        for instruction in instructions:
            match instruction:
                case Deliver():
                    self._network.deliver(instruction.output)
                case Send():
                    self._post(instruction.worker, instruction.message)  # type: ignore[arg-type]
                case Notify():
                    self._post(instruction.peer, instruction.message)  # type: ignore[arg-type]
                case WritePages():
                    self._write(instruction)
                case ReadPages():
                    self._read(instruction)
                case Connect() | AbortTransfer():
                    pass  # a transfer that is aborted ends as if it were not: a little later
        events = self.cache.take_events()
        if events:
            if not self._events:
                self._clock.after(EVENTS_S, self._flush)
            self._events += events

    def _post(self, worker: WorkerId, event: Event) -> None:
        target = self._network.find(worker)
        self._clock.after(MESSAGE_S, lambda: target.handle(event))

    def _write(self, write: WritePages) -> None:
        target = self._network.find(write.peer)
        self.written_bytes += len(write.source) * self.page_bytes

        def landed() -> None:
            target.handle(write.done)
            self.handle(TransferEnded(write.transfer))

        self._clock.at(self._move(self, target, len(write.source)), landed)

    def _read(self, read: ReadPages) -> None:
        source = self._network.find(read.peer)
        self.pulled_bytes += len(read.source) * self.page_bytes
        end = self._move(source, self, len(read.source))
        self._clock.at(end, lambda: self.handle(TransferEnded(read.transfer)))

    def _move(self, source: SimulatedWorker, target: SimulatedWorker, pages: int) -> float:
        """When pages will have arrived that leave when both NICs are free, and then take both."""
        hardware = self.times.hardware
        size = pages * self.page_bytes
        start = max(self._clock.now, source.nic_free[0], target.nic_free[1])
        end = start + size / hardware.nic_bandwidth
        source.nic_free[0] = target.nic_free[1] = end
        return end + hardware.nic_latency_s

    def _copy(self, op: TierOp) -> None:
        """Between the pool and host memory, beside what is computed."""
        assert isinstance(op, CopyOut | CopyIn), "nothing lies below host memory here"
        seconds = len(op.device) * self.page_bytes / self.times.hardware.host_bandwidth
        self.host_free = max(self._clock.now, self.host_free) + seconds
        done = TierEvent(op.op, seconds=seconds)
        self._clock.at(self.host_free, lambda: self.handle(done))

    def _flush(self) -> None:
        events, self._events = tuple(self._events), []
        update = KvUpdate(self.id, self._next_event, events)
        self._next_event += len(events)
        if not self._network.kv_events(update):
            snapshot = tuple(self.cache.snapshot())
            self._network.kv_events(KvUpdate(self.id, self._next_event, snapshot, snapshot=True))


def make_cache(num_pages: int, host_pages: int, page_size: int) -> PrefixCache:
    def lru() -> EvictionPolicy:
        return make_eviction_policy("lru", {})

    pool = PagePool(num_pages)
    if not host_pages:
        return PrefixCache(pool, page_size, lru(), record_events=True)
    host = PrefixCache(PagePool(host_pages), page_size, lru(), record_events=True, tier="host")
    return TieredCache(pool, page_size, lru(), host=host, record_events=True)
