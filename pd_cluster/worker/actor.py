"""The worker as a Ray actor: a thread that runs steps, and methods that put messages into its
mailbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TypeVar, get_args

import ray
import torch
from ray.exceptions import RayError

from pd_cluster.config import Config
from pd_cluster.draw import Drawn
from pd_cluster.errors import WireError
from pd_cluster.mail import Mail
from pd_cluster.nodes import attach, model_folder
from pd_cluster.observability.snapshots import WORK_BUCKETS, Histogram, WorkerSnapshot
from pd_cluster.observability.stopwatch import timed
from pd_cluster.peers import COORDINATOR, ClusterSpec, Peers
from pd_cluster.startup import freeze_heap, go_ahead
from pd_cluster.types import (
    AbortPrefill,
    CacheNews,
    CacheNewsTaken,
    CancelAttempt,
    FirstToken,
    MakeRoom,
    Message,
    Output,
    OutputBatch,
    PagesWritten,
    PrefillAborted,
    PrefillFailed,
    ReportReply,
    RetractionPolicy,
    Role,
    Route,
    StartAttempt,
    StartPrefill,
    WorkerId,
    WorkerReport,
    decode,
    encode,
)
from pd_cluster.worker.cache import make_cache, store_name
from pd_cluster.worker.engine import Engine
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Batch,
    Connect,
    Deliver,
    Event,
    GatewayLost,
    Instruction,
    Notify,
    PeerLost,
    ReadPages,
    Send,
    VerifyPages,
    WritePages,
)
from pd_cluster.worker.kv_feed import KvFeed
from pd_cluster.worker.kv_publisher import make_kv_events
from pd_cluster.worker.scheduler import ADDING, WorkerScheduler
from pd_cluster.worker.tier_figures import tier_figures
from pd_cluster.worker.transfer_agent import make_transfer_agent
from pd_cluster.worker.transport import Transport
from pd_transfer import Event as AgentEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25
# Every worker can do all of them.
ROUTES: tuple[Route, ...] = get_args(Route)
IDLE_S = 60.0
POSTED = (
    StartAttempt,
    CancelAttempt,
    MakeRoom,
    StartPrefill,
    AbortPrefill,
    PagesWritten,
    FirstToken,
    PrefillFailed,
    PrefillAborted,
    CacheNewsTaken,
)

# Messages, questions and watches have event loops of their own: none can hold up another.
WORKER_GROUPS = {"messages": 1, "control": 100}


def _wake_up() -> None:
    """Means nothing but that there is something to look at."""


class WorkerActor:
    """One worker. Everything but the mailbox belongs to its thread; a second one runs the engine,
    so that what comes meanwhile need not wait for the step's end.
    """

    def __init__(self, spec: ClusterSpec, name: str, role: Role) -> None:
        config = self.config = Config.model_validate_json(spec.config)
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        self.id = WorkerId(name, secrets.token_hex(4))
        self.role = role
        self._mailbox: queue.SimpleQueue[Event | AgentEvent | Callable[[], None]] = (
            queue.SimpleQueue()
        )
        self._held: deque[Event | AgentEvent | Callable[[], None]] = deque()  # until a step is over
        # By gateway: what goes out together, once all that has come has been handled.
        self._outputs: dict[str, list[Output]] = defaultdict(list)
        self.engine = Engine.load(model_folder(spec.model_folder, config.model), config)
        self._compute = ThreadPoolExecutor(1, "engine")
        self._compute.submit(self.engine.warm_up).result()
        self.signature = self.engine.signature(spec.model_id)
        attachment = attach(config, local=spec.local)
        self.host = attachment.host
        self.mail = Mail(str(self.id), attachment.host, spec.secret, self._arrived)
        self.peers = Peers(config.cluster_name, self.mail)
        agent = make_transfer_agent(
            config.transfer.backend, str(self.id), spec.secret, attachment.host, attachment.ucx
        )
        self.transport = Transport(
            agent,
            self.engine.layout,
            self._mailbox.put,
            max_inflight_bytes=config.transfer.max_inflight_bytes,
            verify=config.transfer.verify,
        )
        cache, self.tier_io = make_cache(
            config, role, self.engine.layout, self.signature, self._mailbox.put
        )
        self._evictions = Histogram(WORK_BUCKETS)
        cache.stopwatch = partial(timed, self._evictions)
        self.kv_events = make_kv_events(config.kv_events_config, role, name, cache)
        self.scheduler = WorkerScheduler(
            cache,
            worker=self.id,
            agent=self.transport.metadata,
            region=self.engine.layout.region(),
            eos_token_ids=self.engine.decoder.config.eos_token_ids,
            max_running=config.max_running_requests,
            chunk_tokens=config.chunked_prefill_size,
            step_tokens=config.max_prefill_tokens,
            local_tokens=config.local_prefill_size,
            keep_answers=not config.strip_thinking_cache,
            gather=True,
            prefill_s=config.timeouts.prefill_s,
            transfer_s=config.timeouts.transfer_s,
            drain_s=config.timeouts.drain_s,
        )
        self.kv_feed = KvFeed(self.id, cache, self._tell_coordinator)
        self._stopping = threading.Event()
        self._report_now = threading.Event()  # there is room that somebody may wait for
        self._refused: str | None = None
        self._snapshots = 0
        freeze_heap()
        threading.Thread(target=self._run, name="worker", daemon=True).start()
        threading.Thread(target=self._report_forever, name="reports", daemon=True).start()

    # --- methods for other actors ---

    @ray.method(concurrency_group="messages")
    async def post(self, incarnation: str, data: bytes) -> bool:
        """Takes a message; False where it was meant for an earlier life of this worker."""
        if incarnation != self.id.incarnation:
            return False
        self._arrived(data)
        return True

    @ray.method(concurrency_group="control")
    async def mail_address(self) -> tuple[str, int]:
        """Where this worker takes mail."""
        return self.mail.address

    async def watch(self, incarnation: str) -> None:
        """Returns when that life is over: at once for an earlier one, never for this one."""
        if incarnation == self.id.incarnation:
            await asyncio.Event().wait()

    @ray.method(concurrency_group="control")
    async def ready(self) -> str:
        """The worker's id, once its model is loaded."""
        return str(self.id)

    @ray.method(concurrency_group="control")
    async def snapshot(self) -> WorkerSnapshot:
        return await self._ask(self._snapshot)

    @ray.method(concurrency_group="control")
    async def counters(self) -> dict[str, int]:
        """What this worker computed, moved and did not have to move. For tests and debugging."""
        return await self._ask(self._counters)

    def _counters(self) -> dict[str, int]:
        tiers = self.scheduler.tiers
        below = {} if tiers is None else asdict(tiers.tier_statistics())
        return below | {
            "computed_tokens": self.scheduler.prefill.computed_tokens
            + self.scheduler.decode.computed_tokens,
            "pulled_tokens": self.scheduler.prefill.pulled_tokens,
            "prefill_hit_tokens": self.scheduler.prefill.prefill_hit_tokens,
            "written_pages": self.scheduler.prefill.written_pages,
            "reserved_pages": self.scheduler.decode.reserved_pages,
            "resident_pages": self.scheduler.decode.resident_pages,
            "generated_tokens": self.scheduler.decode.generated_tokens,
            "retractions": self.scheduler.decode.retractions.total(),
        }

    @ray.method(concurrency_group="control")
    async def flush(self) -> int:
        """Empties the prefix cache of all that no request uses; the tokens that became free."""
        return await self._ask(lambda: self.scheduler.cache.reset() * self.config.page_size)

    @ray.method(concurrency_group="control")
    async def idle(self) -> bool:
        """Whether nothing of this worker is used: no attempt, no job, no page in flight."""
        return await self._ask(lambda: self.scheduler.idle)

    @ray.method(concurrency_group="control")
    async def give_up(self) -> None:
        """Sends all work away, to be done by others."""
        await self._ask(lambda: self._obey(self.scheduler.give_up(time.monotonic())))

    @ray.method(concurrency_group="control")
    async def validate(self) -> None:
        """Raises AssertionError where an invariant does not hold. For tests and debugging."""
        await self._ask(self.scheduler.validate)

    def _arrived(self, data: bytes) -> None:
        try:
            message = decode(data, POSTED)
        except WireError as error:
            logger.warning("ignored a message: %s", error)
            return
        if isinstance(message, CacheNewsTaken):
            self._mailbox.put(partial(self._news_taken, message.number, message.follows))
            return
        self._mailbox.put(message)
        if isinstance(message, MakeRoom):
            self._report_now.set()  # somebody waits to hear that there is room

    # --- the worker's thread ---

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._question(question))

    def _question(self, question: Callable[[], T]) -> Future[T]:
        """Has a question answered between two steps."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        self._mailbox.put(run)
        return answer

    def _run(self) -> None:
        go_ahead()
        try:
            self._steps()
        except BaseException:
            # A worker with a broken state must not linger: Ray starts a fresh one.
            logger.exception("worker %s stops", self.id)
            logging.shutdown()
            os._exit(1)

    def _steps(self) -> None:
        next_tick, busy = 0.0, False
        while not self._stopping.is_set():
            # With nothing to do there are no deadlines: sleep until there is mail.
            quiet = self.scheduler.idle and not self.kv_feed.pending
            idle_s = IDLE_S if quiet else TICK_S
            gathers_s = self.scheduler.resume_at - time.monotonic()
            if gathers_s > 0:
                idle_s = min(idle_s, gathers_s)
            self._receive(wait_s=0.0 if busy or self._held else idle_s)
            while self._held:
                self._take(self._held.popleft())
            now = time.monotonic()
            if now >= next_tick:
                self._obey(self.scheduler.tick(now))
                next_tick = now + TICK_S
            batch, instructions = self.scheduler.plan(now)
            self._obey(instructions)
            self._deliver_outputs()
            busy = batch is not None
            if batch is not None:
                started = time.monotonic()
                drawn = self._run_step(batch)
                now = time.monotonic()
                self.kv_feed.measure(batch, now - started)
                self._obey(self.scheduler.computed(batch, drawn, now))
                self._deliver_outputs()
            events = self.scheduler.cache.take_events()
            self.kv_feed.take(events, now)
            self.kv_feed.written(self.transport.take_written())
            self.kv_feed.flush(now)
            if self.kv_events is not None:
                self.kv_events.tell(events)

    def _run_step(self, batch: Batch) -> list[Drawn]:
        """What the engine drew. Of what comes meanwhile, in its order, all is handled up to the
        first that has to wait.
        """
        step = self._compute.submit(self.engine.run, batch)
        step.add_done_callback(lambda _: self._mailbox.put(_wake_up))
        while not step.done():
            self._receive(wait_s=IDLE_S)
            self._take_what_adds()
            self._deliver_outputs()
        return step.result()

    def _take_what_adds(self) -> None:
        while self._held:
            item = self._held[0]
            if isinstance(item, AgentEvent):
                self._held.popleft()
                self._held.extendleft(reversed(self.transport.translate(item)))
            elif isinstance(item, ADDING):
                self._take(self._held.popleft())
            else:
                return

    def _receive(self, wait_s: float) -> None:
        """Takes all that is in the mailbox; waits for the first if it is empty."""
        try:
            self._held.append(self._mailbox.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                self._held.append(self._mailbox.get_nowait())
        except queue.Empty:
            pass

    def _take(self, item: Event | AgentEvent | Callable[[], None]) -> None:
        if callable(item):
            self._deliver_outputs()  # who asks may act on what is gone
            item()
            return
        events = self.transport.translate(item) if isinstance(item, AgentEvent) else [item]
        for event in events:
            self._obey(self.scheduler.handle(event, time.monotonic()))

    def _obey(self, instructions: list[Instruction]) -> None:
        for op in self.scheduler.take_tier_ops():
            assert self.tier_io is not None
            self.tier_io.submit(op)
        for instruction in instructions:
            match instruction:
                case Connect():
                    self.transport.connect(instruction)
                case WritePages() | ReadPages():
                    for event in self.transport.move(instruction):
                        self._mailbox.put(event)
                case AbortTransfer():
                    for event in self.transport.abort(instruction):
                        self._mailbox.put(event)
                case VerifyPages():
                    self._mailbox.put(self.transport.check(instruction))
                case Notify():
                    if not self.transport.notify(instruction):
                        self._post(instruction.peer, instruction.message)
                case Send():
                    self._post(instruction.worker, self.transport.seal(instruction.message))
                case Deliver():
                    if instruction.output.outcome == "retracted":
                        self._report_now.set()
                    self._outputs[instruction.gateway].append(instruction.output)

    def _deliver_outputs(self) -> None:
        for gateway, outputs in self._outputs.items():
            self._deliver(gateway, OutputBatch(worker=self.id, outputs=tuple(outputs)))
        self._outputs.clear()

    def _post(self, worker: WorkerId, message: Message) -> None:
        def lost() -> None:
            # Only once nothing of it can land any more; else the transport will tell.
            if self.transport.agent.peer_is_quiet(str(worker)):
                self._mailbox.put(PeerLost(worker))

        self.peers.watch(worker, lost)
        self.peers.post(worker, message, lost)

    def _deliver(self, gateway: str, batch: OutputBatch) -> None:
        self.peers.watch_gateway(gateway, lambda: self._mailbox.put(GatewayLost(gateway)))
        self.peers.deliver(gateway, batch, lambda: self._mailbox.put(GatewayLost(gateway)))

    def _tell_coordinator(self, data: bytes) -> None:
        news = CacheNews(worker=self.id, number=self.kv_feed.updates, update=data)
        self.peers.tell_coordinator(news, partial(self._tell_by_call, news))

    def _tell_by_call(self, news: CacheNews) -> None:
        def done(future: Future[bool]) -> None:
            try:
                follows = future.result()
            except Exception:  # it restarts; the next update will find a gap
                self.peers.forget(COORDINATOR)
                return
            self._mailbox.put(partial(self._news_taken, news.number, follows))

        try:
            ref = self.peers.handle(COORDINATOR).kv_events.remote(news.update)
        except (ValueError, RayError):
            self.peers.forget(COORDINATOR)
            return
        ref.future().add_done_callback(done)

    def _news_taken(self, number: int, follows: bool) -> None:
        if follows:
            self.kv_feed.confirmed(number)
        else:
            self.kv_feed.refused(number)

    # --- reports ---

    def _report_forever(self) -> None:
        while not self._stopping.is_set():
            self._report_now.wait(self.config.timeouts.heartbeat_s)
            self._report_now.clear()
            report, counted = self._question(lambda: (self._report(), self._snapshot())).result()
            try:
                ref = self.peers.handle(COORDINATOR).report.remote(encode(report), counted)
                reply = decode(ref.future().result(timeout=10), ReportReply)
            except Exception as error:  # the coordinator is restarting: try again
                logger.warning("no answer from the coordinator: %s", error)
                self.peers.forget(COORDINATOR)
                continue
            self._mailbox.put(partial(self._adopt, reply.retraction_policy))
            if reply.error != self._refused:
                self._refused = reply.error
                if reply.error:
                    logger.error("refused by the coordinator: %s", reply.error)

    def _adopt(self, policy: RetractionPolicy) -> None:
        self.scheduler.decode.retraction_policy = policy

    def _report(self) -> WorkerReport:
        scheduler = self.scheduler
        size = self.config.page_size
        return WorkerReport(
            worker=self.id,
            role=self.role,
            signature=self.signature,
            capacity=self.config.max_total_tokens,
            available=scheduler.cache.available() * size,
            running=scheduler.prefill.running + scheduler.decode.count("running"),
            waiting=scheduler.prefill.waiting + scheduler.decode.count("awaiting"),
            attempts=tuple(scheduler.decode.sequences),
            routes=ROUTES,
            host=self.host,
            store="" if self.tier_io is None else store_name(self.config, self.host),
        )

    def _snapshot(self) -> WorkerSnapshot:
        scheduler, size = self.scheduler, self.config.page_size
        counts, cached = scheduler.cache.counts(), scheduler.cache.statistics()
        prefill, sequences = scheduler.prefill, scheduler.decode
        page_bytes = self.engine.layout.page_bytes
        self._snapshots += 1
        return WorkerSnapshot(
            number=self._snapshots,
            worker=self.id,
            role=self.role,
            capacity=self.config.max_total_tokens,
            free=counts.free * size,
            private=counts.private * size,
            in_flight=counts.in_flight * size,
            protected=counts.protected * size,
            evictable=counts.evictable * size,
            running=prefill.running + len(sequences.sequences) - sequences.count("awaiting"),
            waiting=prefill.waiting + sequences.count("awaiting"),
            transfers_in_flight=prefill.transfers_inflight,
            cache_queries=cached.queries,
            cache_hits=cached.hits,
            evicted=cached.evicted,
            transfer_bytes=prefill.written_pages * page_bytes,
            transfer_avoided_bytes=sequences.resident_pages * page_bytes,
            transfer_descriptors=self.transport.agent.statistics().descriptors_written,
            transfer_failures=self.scheduler.failed_transfers(),
            retractions=dict(sequences.retractions),
            retracted_tokens=sequences.retracted_tokens,
            transfer_seconds=self.transport.seconds.snapshot(),
            eviction_seconds=self._evictions.snapshot(),
            stage_seconds={
                stage: times.snapshot() for stage, times in sequences.stages.histograms.items()
            },
            index_lag_s=self.kv_feed.lag_s(time.monotonic()),
            **tier_figures(scheduler.tiers, page_bytes),
        )
