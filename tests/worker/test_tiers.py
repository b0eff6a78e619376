"""Workers whose caches have tiers: exact answers whatever comes up from below, and nothing held."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Literal

import numpy as np
import pytest

from pd_cluster.cache.block_hash import chain_hashes, namespace_hash
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_ops import (
    CopyIn,
    CopyOut,
    FetchBlocks,
    ProbeBlocks,
    StopFetch,
    StoreBlocks,
    TierEvent,
    TierOp,
)
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.types import AttemptId, CancelAttempt, IntArray, Route, Sources
from pd_cluster.worker.instructions import Instruction
from pd_cluster.worker.scheduler import WorkerScheduler
from tests.worker.harness import EOS, VOCAB, FakeWorker, World, expected_answer, random_prompt

BLOCK = 16
Storage = dict[bytes, np.ndarray]


class TieredWorker(FakeWorker):
    """A worker with host memory, and storage that outlives it."""

    def __init__(
        self, name: str, num_pages: int, page_size: int, storage: Storage, **options: Any
    ) -> None:
        super().__init__(name, num_pages, page_size, 32)
        policy = make_eviction_policy("lru", {})
        host = PrefixCache(PagePool(options.pop("host_pages")), page_size, policy)
        keep_answers = options.pop("keep_answers", True)
        self.cache = TieredCache(
            PagePool(num_pages),
            page_size,
            make_eviction_policy("lru", {}),
            host=host,
            storage_block=BLOCK,
            **options,
        )
        old = self.scheduler
        self.scheduler = WorkerScheduler(
            self.cache,
            worker=self.id,
            agent=name.encode(),
            region=(0, 0, 0),
            eos_token_ids=[EOS],
            max_running=1000,
            chunk_tokens=old.chunk_tokens,
            local_tokens=old.local_tokens,
            keep_answers=keep_answers,
            prefill_s=1e6,
            transfer_s=1e6,
            drain_s=1e6,
        )
        self.host_memory = np.zeros((host.pool.num_pages, page_size), np.int64)
        self.storage = storage
        self.ops: deque[TierOp] = deque()

    def take_ops(self) -> None:
        for op in self.scheduler.take_tier_ops():
            if isinstance(op, CopyOut) and op.now:
                self.mailbox.append(self.carry_out(op))
            elif not isinstance(op, StopFetch):  # may be too late: here it always is
                self.ops.append(op)

    def carry_out(self, op: TierOp) -> TierEvent:
        tokens = 0
        match op:
            case CopyOut():
                self.host_memory[op.host] = self.memory[op.device]
            case CopyIn():
                self.memory[op.device] = self.host_memory[op.host]
            case ProbeBlocks():
                for key in self.keys(op):
                    if key not in self.storage:
                        break
                    tokens += BLOCK
            case FetchBlocks():
                size = BLOCK // self.page_size
                for number, key in enumerate(self.keys(op)):
                    if key not in self.storage:
                        break
                    self.host_memory[op.host[number * size :][:size]] = self.storage[key]
                    tokens += BLOCK
            case StoreBlocks():
                size = BLOCK // self.page_size
                for number, key in enumerate(self.keys(op)):
                    pages = op.host[number * size :][:size]
                    self.storage[key] = self.host_memory[pages].copy()
        return TierEvent(op.op, tokens, seconds=1e-6)

    def keys(self, op: ProbeBlocks | FetchBlocks | StoreBlocks) -> list[bytes]:
        keys = chain_hashes(op.tokens, BLOCK, namespace_hash(op.namespace))
        return keys[op.start // BLOCK :]


class TieredWorld(World):
    """Copies end in their order, at any time."""

    def step(self) -> bool:
        self.now += 1.0
        choices: list[tuple[str, object]] = [("mail", w) for w in self.workers if w.mailbox]
        choices += [("land", t) for t in self.transfers]
        choices += [("compute", w) for w in self.workers if not w.scheduler.idle]
        choices += [("copy", w) for w in self.tiered if w.ops]
        self.rng.shuffle(choices)
        return any(self._do(kind, subject) for kind, subject in choices)

    @property
    def tiered(self) -> list[TieredWorker]:
        return [worker for worker in self.workers if isinstance(worker, TieredWorker)]

    def _do(self, kind: str, subject: object) -> bool:
        if kind != "copy":
            return super()._do(kind, subject)
        assert isinstance(subject, TieredWorker)
        subject.mailbox.append(subject.carry_out(subject.ops.popleft()))
        return True

    def _compute(self, worker: FakeWorker) -> bool:
        assert isinstance(worker, TieredWorker)
        before = len(worker.ops)
        self._obey(worker, worker.scheduler.tick(self.now))
        return super()._compute(worker) or len(worker.ops) > before

    def _obey(self, worker: FakeWorker, instructions: list[Instruction]) -> None:
        assert isinstance(worker, TieredWorker)
        worker.take_ops()
        super()._obey(worker, instructions)


def make_world(
    seed: int, *, pages: int, host: int, page_size: int = 1, **options: Any
) -> TieredWorld:
    storages: dict[str, Storage] = options.pop("storages", {})
    workers = [
        TieredWorker(
            name,
            pages // page_size,
            page_size,
            storages.setdefault(name, {}),
            host_pages=host // page_size,
            **options,
        )
        for name in ("prefill-0", "decode-0")
    ]
    return TieredWorld(list(workers), random.Random(seed))


def prompt_of(length: int, seed: int) -> IntArray:
    """None shares a prefix with that of another seed below `VOCAB`."""
    rng = random.Random(seed)
    return np.array([seed + 1, *(rng.randrange(1, VOCAB) for _ in range(length - 1))], np.int32)


def at_rest(world: TieredWorld) -> None:
    world.run()
    world.validate()
    for worker in world.tiered:
        assert worker.scheduler.idle
        assert worker.cache.idle


def serve(world: TieredWorld, prompts: list[IntArray], name: str) -> list[Sources]:
    """One after another; where each prompt came from."""
    found = []
    for number, prompt in enumerate(prompts):
        attempt = world.request(prompt, name=f"{name}{number}")
        at_rest(world)
        assert world.answer(attempt) == expected_answer(prompt, 8)
        found += [each.sources for each in world.outputs[attempt] if each.sources]
    return found


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_working_set_of_twice_the_pool_keeps_its_hit_rate(write: str) -> None:
    world = make_world(1, pages=240, host=600, write_policy=write)
    prompts = [prompt_of(60, seed) for seed in range(8)]
    assert [each.computed for each in serve(world, prompts, "cold")] == [60] * 8
    warm = serve(world, prompts, "warm")
    assert [each.computed for each in warm] == [1] * 8
    assert sum(each.host_hit for each in warm) > 240
    assert all(each.prefill_hit + each.host_hit == 59 for each in warm)
    decode = world.tiered[1].cache.tier_statistics()
    assert decode.host_loaded > 240, "decode's tier works as well: nothing is sent again"


def test_without_a_host_tier_that_working_set_is_computed_again() -> None:
    world = make_world(1, pages=240, host=1)
    prompts = [prompt_of(60, seed) for seed in range(8)]
    serve(world, prompts, "cold")
    assert [each.computed for each in serve(world, prompts, "warm")] == [60] * 8


def test_selective_backs_up_what_was_used_twice() -> None:
    world = make_world(1, pages=240, host=600, write_policy="write_through_selective")
    prompts = [prompt_of(60, seed) for seed in range(8)]
    serve(world, [prompts[0], prompts[0]], "twice")
    serve(world, prompts[1:], "once")
    again = serve(world, [prompts[0], prompts[1]], "again")
    assert [each.computed for each in again] == [1, 60]
    assert again[0].host_hit > 0


def test_a_restarted_worker_finds_on_disk_what_the_first_one_wrote() -> None:
    storages: dict[str, Storage] = {}
    prompts = [prompt_of(70, seed) for seed in range(3)]
    serve(make_world(1, pages=400, host=800, storages=storages), prompts, "before")
    world = make_world(2, pages=400, host=800, storages=storages, prefetch_policy="wait_complete")
    for found in serve(world, prompts, "after"):
        assert found == Sources(computed=70 - 64, disk_hit=64), "whole blocks of 16"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("page_size", [1, 4])
def test_answers_are_exact_whatever_comes_up_from_below(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    world = make_world(
        seed,
        pages=rng.choice([160, 320]),
        host=rng.choice([64, 640]),
        page_size=page_size,
        write_policy=rng.choice(["write_through", "write_back", "write_through_selective"]),
        prefetch_policy=rng.choice(["best_effort", "wait_complete", "timeout"]),
    )
    shared: list[IntArray] = []
    prompts: dict[AttemptId, IntArray] = {}
    routes: list[Route] = ["remote", "remote+pull", "local"]
    for number in range(40):
        prompt = random_prompt(rng, rng.randrange(1, 90), shared)
        attempt = world.request(prompt, name=f"r{number}", max_tokens=6, route=rng.choice(routes))
        prompts[attempt] = prompt
        for _ in range(rng.randrange(40)):
            world.step()
        if rng.random() < 0.1:
            world.worker("decode-0").mailbox.append(CancelAttempt(attempt=attempt))
    at_rest(world)
    ended: dict[str, int] = {}
    for attempt, prompt in prompts.items():
        outcome = world.outcome(attempt)
        assert outcome is not None
        ended[outcome] = ended.get(outcome, 0) + 1
        answer, expected = world.answer(attempt), expected_answer(prompt, 6)
        assert answer == expected[: len(answer)]
        if outcome == "finished":
            assert answer == expected
        for output in world.outputs[attempt]:
            if output.sources is not None:
                found = output.sources
                assert found.computed + found.cached == len(prompt)
    assert ended["finished"] > 20, ended


def test_answers_are_not_kept_where_that_is_so_set() -> None:
    kept: list[int] = []
    policies: list[Literal["write_through"]] = ["write_through"]
    for keep in (True, False):
        world = make_world(3, pages=200, host=200, keep_answers=keep, write_policy=policies[0])
        prompt = prompt_of(30, 5)
        attempt = world.request(prompt, name="a", max_tokens=12, ignore_eos=True)
        at_rest(world)
        answer = np.array(world.answer(attempt), np.int32)
        longer = np.concatenate([prompt, answer])
        cache = world.tiered[1].cache
        kept.append(cache.match(longer, now=world.now, count_hit=False).length)
    assert kept == [41, 30]


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_retracted_requests_pages_are_found_on_the_tier_they_went_to(write: str) -> None:
    """Its pages are published; the sequence that stays pushes them out of the pool, not further."""
    world = make_world(1, pages=160, host=600, write_policy=write)
    prompts = {name: prompt_of(40, seed) for seed, name in enumerate("ab")}
    attempts = [
        world.request(prompt, name=name, max_tokens=100, ignore_eos=True)
        for name, prompt in prompts.items()
    ]
    at_rest(world)
    outcomes = {world.outcome(attempt): attempt for attempt in attempts}
    assert outcomes.keys() == {"retracted", "finished"}
    first = outcomes["retracted"]
    sent = world.answer(first)
    held = 40 + len(sent) - 1  # the last token's KV was never computed

    decode = world.tiered[1].cache
    prompt = prompts[first.request]
    tokens = np.concatenate([prompt, np.array(sent, np.int32)])
    left = decode.match(tokens, now=world.now, count_hit=False).length
    assert left < held, "some of it had to go"
    loaded = decode.tier_statistics().host_loaded
    again = world.request(
        prompt,
        name=first.request,
        number=1,
        sent=sent,
        max_tokens=100,
        ignore_eos=True,
        route="local",
    )
    at_rest(world)
    assert sent + world.answer(again) == expected_answer(prompt, 100, ignore_eos=True)
    assert decode.tier_statistics().host_loaded - loaded == held - left
    (sources,) = (each.sources for each in world.outputs[again] if each.sources)
    assert sources == Sources(computed=len(tokens) - held, decode_hit=left, host_hit=held - left)
