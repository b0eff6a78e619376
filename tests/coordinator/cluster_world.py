"""A cluster of pure parts: the coordinator, both schedulers of every worker, and simple gateways.

Messages to the coordinator can be lost or come twice, workers die, the coordinator restarts and
clients leave. Memory knows what it should hold (`tests.worker.harness`), so a wrong page is seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pd_cluster.cache.events import StorageHolds
from pd_cluster.config import Config
from pd_cluster.coordinator.choice import RouteLimits, Weights
from pd_cluster.coordinator.costs import Priors, TierMeasured
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.prefix_hash import block_hashes, pack_hashes
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.coordinator.state import Answer, CoordinatorState
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    IntArray,
    Outcome,
    Placement,
    PlaceRequest,
    RetractionPolicy,
    Role,
    SamplingParams,
    Sources,
    StartAttempt,
    WorkerReport,
    pack_ints,
)
from tests.worker.harness import FakeWorker, World, expected_answer, random_prompt
from tests.worker.tiered import Storage, TieredWorker, TieredWorld

# One world step is a second, and messages are lost: leases and silences last long.
CONFIG = Config.model_validate(
    {
        "max_running_requests": 6,
        "max_queued_requests": 1000,
        "timeouts": {"lease_s": 200, "heartbeat_s": 1000},
    }
)
PRIORS = Priors(prefill=(1.0, 0.1, 0.0), decode=(1.0, 0.1, 0.0))
PAGES, CHUNK, BLOCK = 260, 24, 64
WHOLE = ("remote", "remote+pull", "local")


@dataclass
class Client:
    """One request as its gateway sees it."""

    prompt: IntArray
    max_tokens: int
    priority: int
    number: int = 0
    sent: list[int] = field(default_factory=list)
    placed: Placement | None = None
    read: int = 0  # outputs of the current attempt that were taken
    end: str = ""
    sources: Sources | None = None
    retractions: int = 0


class ClusterWorld:
    """`disturb` False: nothing is lost and nobody dies any more."""

    def __init__(
        self,
        seed: int,
        *,
        placement: str,
        schedule_policy: str,
        page_size: int,
        pages: int = PAGES,
        workers: int = 2,
        by_priority: bool = False,
        retraction_policy: RetractionPolicy = "length",
        tiers: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.storage: Storage | None = {} if tiers else None  # shared by all
        self.page_size = page_size
        self.pages = pages
        names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(workers)]
        make = TieredWorld if tiers else World
        self.world = make([self._worker(name) for name in names], random.Random(seed))
        self.world.reorder = True
        self.scheduling = Scheduling(
            placement=placement,
            schedule_policy=schedule_policy,
            enable_priority_scheduling=by_priority,
            retraction_policy=retraction_policy,
            priors=PRIORS,
            weights=Weights(bind_ahead_s=5.0),
            limits=RouteLimits(pull=True, local=True, itl_limit_s=50.0, chunk_tokens=CHUNK),
        )
        self.clients: dict[str, Client] = {}
        self.outcomes: Counter[str] = Counter()  # of attempts
        self.preemptions = 0
        self.shared: list[IntArray] = []
        self.disturb = False
        self.born = workers
        self.restarts = 0
        self.reads = 0
        self.state = self._new_state()
        for worker in self.world.workers:
            self._report(worker)
        self.disturb = True

    # --- what happens ---

    def arrive(
        self,
        length: int | None = None,
        max_tokens: int | None = None,
        priority: int | None = None,
    ) -> str:
        name = self._new_client(length, max_tokens, priority)
        self._ask(name)
        return name

    def abort(self) -> None:
        alive = [name for name, client in self.clients.items() if not client.end]
        if alive:
            self._leave(self.rng.choice(alive))

    def leave_at_once(self) -> None:
        """A client that is gone as soon as it was placed: its cancel is on the heels of its start.
        Or sooner: then its end may be there before its question.
        """
        if self.rng.random() < 0.5:
            self._leave(self.arrive())
            return
        name = self._new_client()
        client = self.clients[name]
        client.end = "aborted"
        question = self._question(name)
        event = AttemptEnded(attempt=question.attempt, outcome="aborted")
        self._coordinate(lambda: self.state.ended(event, self.world.now))
        self._coordinate(lambda: self.state.place(question, self.world.now))
        assert question.attempt not in self.state.leases
        assert question.attempt not in self.state.waiting

    def report(self) -> None:
        self._report(self.rng.choice(self.world.workers))

    def tick(self) -> None:
        self._coordinate(lambda: self.state.tick(self.world.now))

    def kill(self) -> None:
        """A worker dies, and another one with nothing in it takes its place."""
        worker = self.rng.choice(self.world.workers)
        role = worker.id.name.split("-")[0]
        self.world.kill(worker)
        newborn = self._worker(f"{role}-{self.born}")
        self.born += 1
        self.world.workers.append(newborn)
        self._report(newborn)
        self._coordinate(lambda: self.state.worker_lost(worker.id, self.world.now))
        for name, client in self.clients.items():
            placed = client.placed
            if placed is not None and placed.decode == worker.id and not client.end:
                self._again(name, "failed")

    def restart(self) -> None:
        """The coordinator forgets everything; gateways ask again, workers report in their time."""
        self.restarts += 1
        self.state = self._new_state()
        for name, client in self.clients.items():
            if not client.end and client.placed is None:
                self._ask(name)

    def step(self) -> bool:
        """One thing in one worker, and what its gateways make of it."""
        moved = self.world.step()
        for name, client in self.clients.items():
            if not client.end:
                self._take(name, client)
        return moved

    def settle(self) -> None:
        """Peace: every request must end, and then nothing is held anywhere."""
        self.disturb = False
        for round_ in range(20_000):
            self.step()
            if round_ % 20 == 0:
                for worker in list(self.world.workers):
                    self._report(worker)
                self.tick()
                for name, client in self.clients.items():
                    if not client.end and client.placed is None:
                        self._ask(name)  # idempotent where it is known
            if all(client.end for client in self.clients.values()) and not self._busy():
                break
        unfinished = {name: c.placed for name, c in self.clients.items() if not c.end}
        assert not unfinished, f"never ended: {unfinished}"
        self.world.run()
        self.validate()
        for worker in self.world.workers:
            assert worker.scheduler.idle
        for attempt in self.world.cancelled_early:
            assert self.world.outcome(attempt) in ("aborted", None)  # None: with its worker
            assert not self.world.answer(attempt), f"{attempt} was cancelled and ran"

    def validate(self) -> None:
        self.world.validate()
        self.state.validate()
        for name, client in self.clients.items():
            expected = expected_answer(client.prompt, client.max_tokens)
            assert client.sent == expected[: len(client.sent)], f"{name}: other tokens"
            if client.end == "finished":
                assert client.sent == expected, f"{name}: an answer that is not whole"

    # --- within ---

    def _worker(self, name: str) -> FakeWorker:
        pages = self.pages // self.page_size
        if self.storage is None:
            return FakeWorker(name, pages, self.page_size, CHUNK)
        return TieredWorker(
            name, pages, self.page_size, self.storage, chunk=CHUNK, host_pages=2 * pages
        )

    def _new_client(
        self,
        length: int | None = None,
        max_tokens: int | None = None,
        priority: int | None = None,
    ) -> str:
        name = f"r{len(self.clients)}"
        self.clients[name] = Client(
            prompt=random_prompt(self.rng, length or self.rng.randrange(1, 160), self.shared),
            max_tokens=max_tokens or self.rng.randrange(1, 30),
            priority=self.rng.randrange(3) if priority is None else priority,
        )
        return name

    def _leave(self, name: str) -> None:
        client = self.clients[name]
        client.end = "aborted"
        if client.placed is not None:
            decode = self.world.by_id(client.placed.decode)
            if decode is not None:
                decode.mailbox.append(CancelAttempt(attempt=AttemptId(name, client.number)))
        self._end(name, "aborted")

    def _busy(self) -> bool:
        return any(worker.mailbox or not worker.scheduler.idle for worker in self.world.workers)

    def _new_state(self) -> CoordinatorState:
        return CoordinatorState(CONFIG, self.scheduling, page_size=self.page_size)

    def _lost(self) -> bool:
        return self.disturb and self.rng.random() < 0.1

    def _coordinate(self, call: Callable[[], list[Answer]]) -> None:
        answers = call()
        for worker, order in self.state.take_orders():
            target = self.world.by_id(worker)
            for _ in range(0 if self._lost() else 2 if self._lost() else 1):
                if target is not None:
                    self.preemptions += 1
                    target.mailbox.append(order)
        for answer in answers:
            name = answer.attempt.request
            client = self.clients[name]
            if client.end or client.number != answer.attempt.number or client.placed is not None:
                continue
            if isinstance(answer.reply, Placement):
                self._start(name, client, answer.reply)
            elif answer.reply.status != 503:
                client.end = f"rejected: {answer.reply.message}"

    def _question(self, name: str) -> PlaceRequest:
        client = self.clients[name]
        tokens = self._tokens(client)
        return PlaceRequest(
            attempt=AttemptId(name, client.number),
            gateway="gateway-0",
            prompt_len=len(tokens),
            max_tokens=client.max_tokens - len(client.sent),
            timeout_s=1e9,
            priority=client.priority,
            resumed=client.number > 0,
            retractions=client.retractions,
            blocks=pack_hashes(block_hashes(tokens, max(BLOCK, self.page_size))),
        )

    def _ask(self, name: str) -> None:
        request = self._question(name)
        if self._lost():
            return  # the gateway asks again in `settle`, or after a restart
        for _ in range(2 if self._lost() else 1):
            self._coordinate(lambda: self.state.place(request, self.world.now))

    def _tokens(self, client: Client) -> IntArray:
        return np.concatenate([client.prompt, np.array(client.sent, np.int32)])

    def _start(self, name: str, client: Client, placement: Placement) -> None:
        decode = self.world.by_id(placement.decode)
        client.placed, client.read = placement, 0
        if decode is None:
            self._again(name, "failed")
            return
        decode.mailbox.append(
            StartAttempt(
                attempt=placement.attempt,
                gateway="gateway-0",
                prefill=placement.prefill,
                tokens=pack_ints(self._tokens(client)),
                prompt_len=len(client.prompt),
                params=SamplingParams(max_tokens=client.max_tokens, temperature=0),
                timeout_s=1e9,
                route=placement.route,
                priority=client.priority,
                retractions=client.retractions,
            )
        )

    def _take(self, name: str, client: Client) -> None:
        outputs = self.world.outputs[AttemptId(name, client.number)]
        while client.read < len(outputs):
            output = outputs[client.read]
            client.read += 1
            client.sent += output.tokens
            if output.sources is not None:
                sources = output.sources
                length = len(client.prompt) + len(client.sent) - 1
                assert sources.computed + sources.cached == length
                assert sources.cached <= length - 1
            if output.outcome == "finished":
                client.end = "finished"
                self._end(name, "finished")
                return
            if output.outcome is not None:
                self._again(name, output.outcome)
                return

    def _again(self, name: str, outcome: Outcome) -> None:
        client = self.clients[name]
        self.outcomes[outcome] += 1
        client.retractions += outcome == "retracted"
        if outcome == "retracted" and client.placed is not None:
            decode = self.world.by_id(client.placed.decode)
            if decode is not None:
                self._report(decode)  # it tells at once that there is room
        self._end(name, outcome)
        client.number += 1
        client.placed, client.read = None, 0
        self._ask(name)

    def _end(self, name: str, outcome: Outcome) -> None:
        if self._lost():
            return
        event = AttemptEnded(attempt=AttemptId(name, self.clients[name].number), outcome=outcome)
        for _ in range(2 if self._lost() else 1):
            self._coordinate(lambda: self.state.ended(event, self.world.now))

    def _report(self, worker: FakeWorker) -> None:
        role: Role = "prefill" if worker.id.name.startswith("prefill") else "decode"
        scheduler = worker.scheduler
        report = WorkerReport(
            worker=worker.id,
            role=role,
            signature={},
            capacity=self.pages,
            available=worker.cache.available() * self.page_size,
            running=scheduler.prefill.running + scheduler.decode.count("running"),
            waiting=scheduler.prefill.waiting,
            attempts=tuple(scheduler.decode.sequences),
            routes=WHOLE,  # type: ignore[arg-type]
            store="" if self.storage is None else "store",
        )
        if self._lost():
            return
        reply, answers = self.state.report(report, self.world.now)
        scheduler.decode.retraction_policy = reply.retraction_policy
        self._coordinate(lambda: answers)
        held = list(worker.cache.snapshot())
        # What is in storage is told once, and of pages that are still there.
        held += [each for each in worker.cache.take_events() if isinstance(each, StorageHolds)]
        self.state.kv_events(KvUpdate(worker.id, 0, tuple(held), snapshot=True), self.world.now)
        if isinstance(worker, TieredWorker):
            reads = [TierMeasured(*read) for read in worker.cache.take_reads()]
            self.reads += len(reads)
            self.state.measured(worker.id, reads)
