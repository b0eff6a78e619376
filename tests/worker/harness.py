"""Two or more pure workers in virtual time, with a memory that knows what it should hold.

The stand-in for KV is a hash of the whole prefix at every position. So a row that is computed over
a page that was not written, was overwritten or belongs to another prefix is noticed at once; and
the next token is a function of that hash, so that every route must give the same answer.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.draw import Drawn, Scores
from pd_cluster.types import (
    AbortPrefill,
    AttemptId,
    CancelAttempt,
    IntArray,
    MakeRoom,
    Output,
    Route,
    SamplingParams,
    StartAttempt,
    StartPrefill,
    WorkerId,
    pack_ints,
)
from pd_cluster.worker.instructions import (
    AbortTransfer,
    Batch,
    Connect,
    Deliver,
    Event,
    Instruction,
    Notify,
    PagesCorrupt,
    PeerLost,
    ReadPages,
    Row,
    Send,
    TransferEnded,
    VerifyPages,
    WritePages,
)
from pd_cluster.worker.scheduler import ADDING, WorkerScheduler

VOCAB = 50
EOS = 0
HASH = 1_000_003
MASK = (1 << 61) - 1


def prefix_hashes(tokens: IntArray, start_hash: int = 7) -> list[int]:
    hashes, value = [], start_hash
    for token in tokens.tolist():
        value = (value * HASH + token + 1) & MASK
        hashes.append(value)
    return hashes


def next_token(prefix_hash: int) -> int:
    return (prefix_hash >> 13) % VOCAB


def expected_answer(prompt: IntArray, max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """What any route must answer."""
    value, answer = prefix_hashes(prompt)[-1], []
    while len(answer) < max_tokens:
        token = next_token(value)
        answer.append(token)
        if token == EOS and not ignore_eos:
            break
        value = (value * HASH + token + 1) & MASK
    return answer


class FakeWorker:
    """One worker: its scheduler, its memory, its mailbox."""

    def __init__(
        self, name: str, num_pages: int, page_size: int, chunk: int, **options: int
    ) -> None:
        self.id = WorkerId(name, "i0")
        self.page_size = page_size
        pool = PagePool(num_pages)
        self.cache = PrefixCache(pool, page_size, make_eviction_policy("lru", {}))
        self.memory = np.zeros((num_pages, page_size), np.int64)
        self.scheduler = WorkerScheduler(
            self.cache,
            worker=self.id,
            agent=name.encode(),
            region=(0, 0, 0),
            eos_token_ids=[EOS],
            max_running=options.get("max_running", 1000),
            chunk_tokens=chunk,
            local_tokens=max(1, chunk // 4),
            prefill_s=1e6,
            transfer_s=1e6,
            drain_s=1e6,
        )
        self.mailbox: deque[Event] = deque()
        self.step: Batch | None = None  # that is being computed
        self.connected: set[WorkerId] = set()

    def run(self, batch: Batch) -> list[Drawn]:
        for source, target in batch.copies:
            self.memory[target] = self.memory[source]
        drawn = [self._run(row) for row in batch.rows]
        return [
            Drawn(token, scores=None if row.known is None else known_scores(row))
            for row, token in zip(batch.rows, drawn, strict=True)
            if row.asks
        ]

    def _run(self, row: Row) -> int | None:
        sequence = self.scheduler.decode.sequences.get(row.attempt)
        job = self.scheduler.prefill.jobs.get(row.attempt)
        full = sequence.tokens if sequence else job.tokens  # type: ignore[union-attr]
        hashes = prefix_hashes(full[: row.end])
        slots = self.memory[row.pages].reshape(-1)
        assert np.array_equal(slots[: row.start], hashes[: row.start]), "KV of another prefix"
        assert np.array_equal(row.tokens, full[row.start : row.end])
        for position in range(row.start, row.end):
            page, offset = divmod(position, self.page_size)
            self.memory[row.pages[page], offset] = hashes[position]
        return next_token(hashes[-1]) if row.draw is not None else None


def known_scores(row: Row) -> Scores:
    """Each token's id as its logprob, so that one sees which was scored."""
    assert row.known is not None
    tokens = row.known.tokens
    assert len(row.tokens) == row.num_logits
    none = np.empty((len(tokens), 0))
    return Scores(tokens.astype(np.float32), tokens, none.astype(np.int32), none.astype(np.float32))


@dataclass
class Transfer:
    source: FakeWorker
    write: WritePages | ReadPages
    aborted: bool = False


GOOD, BAD = b"good", b"bad!"
# What comes by calls to an actor, which may overtake each other and everything else.
CALLS = (StartAttempt, CancelAttempt, MakeRoom, StartPrefill, AbortPrefill)


@dataclass
class World:
    """Workers, their mail and transfers under way; what happens next is seeded chance."""

    workers: list[FakeWorker]
    rng: random.Random
    outputs: dict[AttemptId, list[Output]] = field(default_factory=lambda: defaultdict(list))
    transfers: list[Transfer] = field(default_factory=list)
    now: float = 0.0
    # Pages travel with checksums; of how many more writes these will not hold.
    verify: bool = False
    corrupt: int = 0
    # Whether messages overtake each other, and how many have.
    reorder: bool = False
    overtaken: int = 0
    # Attempts whose cancel came before their start.
    cancelled_early: set[AttemptId] = field(default_factory=set)

    @classmethod
    def make(
        cls,
        seed: int,
        *,
        pages: int = 400,
        page_size: int = 1,
        chunk: int = 32,
        prefill: int = 1,
        decode: int = 1,
        **options: int,
    ) -> World:
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        workers = [
            FakeWorker(name, pages // page_size, page_size, chunk, **options) for name in names
        ]
        return cls(workers, random.Random(seed))

    def worker(self, name: str) -> FakeWorker:
        return next(worker for worker in self.workers if worker.id.name == name)

    def by_id(self, worker: WorkerId) -> FakeWorker | None:
        return next((each for each in self.workers if each.id == worker), None)

    def request(
        self,
        prompt: IntArray,
        *,
        name: str,
        number: int = 0,
        sent: list[int] | None = None,
        max_tokens: int = 8,
        ignore_eos: bool = False,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        timeout_s: float = 1e9,
        namespace: str | None = None,
        route: Route = "remote",
        priority: int = 0,
        retractions: int = 0,
        prompt_logprobs: int = -1,
    ) -> AttemptId:
        attempt = AttemptId(name, number)
        tokens = np.concatenate([prompt, np.array(sent or [], np.int32)])
        start = StartAttempt(
            attempt=attempt,
            gateway="gateway-0",
            prefill=self.worker(prefill).id,
            tokens=pack_ints(tokens),
            prompt_len=len(prompt),
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=ignore_eos,
                prompt_logprobs=prompt_logprobs,
            ),
            timeout_s=timeout_s,
            namespace=namespace,
            route=route,
            priority=priority,
            retractions=retractions,
        )
        self.worker(decode).mailbox.append(start)
        return attempt

    def answer(self, attempt: AttemptId) -> list[int]:
        return [token for output in self.outputs[attempt] for token in output.tokens]

    def outcome(self, attempt: AttemptId) -> str | None:
        ends = [output.outcome for output in self.outputs[attempt] if output.outcome]
        assert len(ends) <= 1, "an attempt ended twice"
        return ends[0] if ends else None

    # --- what can happen next ---

    def step(self) -> bool:
        """One random thing that can happen; False if nothing can."""
        self.now += 1.0
        choices = self.possible()
        self.rng.shuffle(choices)
        return any(self._do(kind, subject) for kind, subject in choices)

    def possible(self) -> list[tuple[str, object]]:
        choices: list[tuple[str, object]] = [("land", t) for t in self.transfers]
        for worker in self.workers:
            if worker.step is not None:
                choices.append(("end", worker))
            elif not worker.scheduler.idle:
                choices.append((self.rng.choice(("begin", "compute")), worker))
            adds = worker.mailbox and isinstance(worker.mailbox[0], ADDING)
            if worker.mailbox and (worker.step is None or adds):
                choices.append(("mail", worker))
        return choices

    def run(self, limit: int = 200_000) -> None:
        """Until nothing more can happen."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the world does not come to rest")

    def validate(self) -> None:
        for worker in self.workers:
            worker.scheduler.validate()

    def kill(self, worker: FakeWorker) -> None:
        """The process dies: its mail is lost, its transfers end, and the others are told."""
        self.workers.remove(worker)
        for transfer in [t for t in self.transfers if t.source is worker]:
            self.transfers.remove(transfer)
        for transfer in [t for t in self.transfers if t.write.peer == worker.id]:
            self.transfers.remove(transfer)
            transfer.source.mailbox.append(TransferEnded(transfer.write.transfer, "peer lost"))
        for other in self.workers:
            other.mailbox.append(PeerLost(worker.id))

    def _do(self, kind: str, subject: object) -> bool:
        if kind == "mail":
            assert isinstance(subject, FakeWorker)
            self._obey(subject, subject.scheduler.handle(self._receive(subject), self.now))
        elif kind == "land":
            assert isinstance(subject, Transfer)
            self._land(subject)
        else:
            assert isinstance(subject, FakeWorker)
            return getattr(self, f"_{kind}")(subject)  # type: ignore[no-any-return]
        return True

    def _receive(self, worker: FakeWorker) -> Event:
        """The next message: the oldest, or one of the calls that have overtaken it."""
        mailbox, index = worker.mailbox, 0
        if self.reorder and worker.step is None and self.rng.random() < 0.5:
            calls = [i for i, event in enumerate(mailbox) if isinstance(event, CALLS)]
            index = self.rng.choice(calls or [0])
        self.overtaken += index > 0
        event = mailbox[index]
        del mailbox[index]
        if isinstance(event, CancelAttempt):
            unborn = (e.attempt for e in mailbox if isinstance(e, StartAttempt))
            if event.attempt in unborn:
                self.cancelled_early.add(event.attempt)
        return event

    def _compute(self, worker: FakeWorker) -> bool:
        """A whole step, in which nothing else happens."""
        moved = self._begin(worker)
        return worker.step is not None and self._end(worker) or moved

    def _begin(self, worker: FakeWorker) -> bool:
        worker.step, instructions = worker.scheduler.plan(self.now)
        self._obey(worker, instructions)
        return worker.step is not None or bool(instructions)

    def _end(self, worker: FakeWorker) -> bool:
        """Now all is written that the step computed."""
        batch, worker.step = worker.step, None
        assert batch is not None
        drawn = worker.run(batch)
        self._obey(worker, worker.scheduler.computed(batch, drawn, self.now))
        return True

    def _land(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        write, source = transfer.write, transfer.source
        target = self.by_id(write.peer)
        if target is None or transfer.aborted:
            source.mailbox.append(TransferEnded(write.transfer, "aborted"))
            return
        if isinstance(write, ReadPages):
            source.memory[write.target] = target.memory[write.source]
        else:
            target.memory[write.target] = source.memory[write.source]
            done = write.done
            if self.verify:
                sums, self.corrupt = (BAD, self.corrupt - 1) if self.corrupt else (GOOD, 0)
                done = msgspec.structs.replace(done, checksums=sums * done.count)
            target.mailbox.append(done)
        source.mailbox.append(TransferEnded(write.transfer))

    def _obey(self, worker: FakeWorker, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case WritePages() | ReadPages():
                    assert instruction.peer in worker.connected
                    assert len(instruction.source) == len(instruction.target) > 0
                    self.transfers.append(Transfer(worker, instruction))
                case AbortTransfer():
                    for transfer in self.transfers:
                        if (transfer.source, transfer.write.transfer) == (
                            worker,
                            instruction.transfer,
                        ):
                            transfer.aborted = self.rng.random() < 0.5
                case VerifyPages():
                    message = instruction.message
                    assert len(instruction.pages) == message.count
                    if message.checksums == GOOD * message.count:
                        worker.mailbox.append(msgspec.structs.replace(message, checksums=b""))
                    else:
                        worker.mailbox.append(PagesCorrupt(message.attempt))
                case Connect():
                    worker.connected.add(instruction.peer)
                case Notify():
                    target = self.by_id(instruction.peer)
                    if target:
                        target.mailbox.append(instruction.message)  # type: ignore[arg-type]
                case Send():
                    target = self.by_id(instruction.worker)
                    if target:
                        target.mailbox.append(instruction.message)  # type: ignore[arg-type]
                    else:
                        worker.mailbox.append(PeerLost(instruction.worker))
                case Deliver():
                    self.outputs[instruction.output.attempt].append(instruction.output)


def random_prompt(rng: random.Random, length: int, shared: list[IntArray]) -> IntArray:
    """A prompt of which a random part is often a prefix that others have too."""
    own = np.array([rng.randrange(1, VOCAB) for _ in range(length)], np.int32)
    if shared and rng.random() < 0.7:
        base = rng.choice(shared)
        keep = rng.randrange(0, min(len(base), length) + 1)
        own[:keep] = base[:keep]
    shared.append(own)
    return own
