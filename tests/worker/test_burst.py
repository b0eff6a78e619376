"""A burst that shares prefixes computes each of them once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pd_cluster.worker.instructions import Notify, WritePages
from tests.worker.harness import FakeWorker, World, expected_answer
from tests.worker.test_scheduler import finish, prompt_of

GROUPS, REQUESTS = 8, 64


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("decode", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_burst_computes_each_shared_prefix_once(seed: int, decode: int, page_size: int) -> None:
    """64 requests of 8 prefix groups in one instant, interleaved: as many tokens are computed as
    the prefixes have, and at most one a request. Who shares what is being computed waits for it.
    """
    length = 200
    # Chunks of odd sizes: what is left of a step's budget must not start a prefix twice.
    chunk = [32, 70, 90, 333][seed % 4]
    world = World.make(seed, pages=40_000, page_size=page_size, chunk=chunk, decode=decode)
    prefill = world.worker("prefill-0").scheduler
    prefill.step_tokens = prefill.chunk_tokens * (1 + seed // 4)
    groups = [prompt_of(length, seed=100 + group) for group in range(GROUPS)]
    asked = {}
    for number in range(REQUESTS):
        tail = np.full(page_size, number % 40 + 1, np.int32)
        # Whole prefixes, and prefixes with an own token: on a page's end, so that all is published.
        prompt = groups[number % GROUPS]
        if number % 16 >= GROUPS:
            prompt = np.concatenate([prompt, tail])
        attempt = world.request(
            prompt,
            name=str(number),
            max_tokens=3,
            ignore_eos=True,
            decode=f"decode-{number // GROUPS % decode}",
        )
        asked[attempt] = prompt
    finish(world)
    for attempt, prompt in asked.items():
        assert world.answer(attempt) == expected_answer(prompt, 3, ignore_eos=True)
    computed = prefill.prefill.computed_tokens
    # Of each request its own token (a page of them), or the last one, for the logits.
    own = sum(max(1, len(prompt) - length) for prompt in asked.values())
    assert GROUPS * length <= computed <= GROUPS * length + own


def test_prompts_that_share_little_do_not_wait_for_each_other() -> None:
    """A chat template's first tokens are no reason to compute one prompt after another."""
    world = World.make(1, pages=4000, chunk=50)
    prefill = world.worker("prefill-0").scheduler
    prefill.step_tokens = 100
    shared = prompt_of(20)
    for number in range(2):
        own = prompt_of(100, seed=number + 5)
        world.request(np.concatenate([shared, own]), name=str(number))
    while world.worker("decode-0").mailbox or world.worker("prefill-0").mailbox:
        for worker in world.workers:
            if worker.mailbox:
                world._do("mail", worker)
    batch, _ = prefill.plan(world.now)
    assert batch is not None
    assert [len(row.tokens) for row in batch.prefill] == [50, 50]


@pytest.mark.parametrize("seed", range(3))
def test_who_began_before_one_that_lacks_pages_goes_on_and_nobody_follows(seed: int) -> None:
    """`longer` waits for the prefix that `first` computes; by then `other` has begun behind it and
    holds the pages that it lacks.
    """
    workers = [FakeWorker(f"decode-{i}", 400, 1, 32) for i in range(2)]
    world = World([FakeWorker("prefill-0", 200, 1, 32), *workers], random.Random(seed))
    prompts = {
        "first": prompt_of(80),
        "longer": np.concatenate([prompt_of(80), prompt_of(80, seed=2)]),
        "other": prompt_of(100, seed=3),
        "last": prompt_of(10, seed=4),
    }
    attempts = {}
    for name, prompt in prompts.items():
        # Another decode worker, or `longer` would wait there.
        decode = "decode-0" if name == "first" else "decode-1"
        attempts[name] = world.request(prompt, name=name, decode=decode)
    prefill = world.worker("prefill-0")
    for worker in [*workers, prefill]:
        while worker.mailbox:
            world._do("mail", worker)
    jobs = prefill.scheduler.prefill.jobs
    longer, other, last = (jobs[attempts[name]] for name in ("longer", "other", "last"))
    while longer.state == "waiting":
        assert last.state == "waiting"  # it would fit
        assert world.step(), "nothing moves any more"
    assert other.state == "done"
    finish(world)
    for name, prompt in prompts.items():
        assert world.answer(attempts[name]) == expected_answer(prompt, 8)


def test_first_tokens_are_told_before_pages_are_moved() -> None:
    """Of a step that ends several prompts: nobody waits for the bytes of others."""
    world = World.make(0, pages=400, chunk=256)
    decode, prefill = world.worker("decode-0"), world.worker("prefill-0")
    for index in range(3):
        world.request(np.full(20, index + 1, np.int32), name=str(index))
        world._do("mail", decode)
        world._do("mail", prefill)
    batch, _ = prefill.scheduler.plan(world.now)
    assert batch is not None
    out = prefill.scheduler.computed(batch, prefill.run(batch), world.now)
    assert [type(each) for each in out] == [Notify] * 3 + [WritePages] * 3
