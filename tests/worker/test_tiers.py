"""Workers whose caches have tiers: exact answers whatever comes up from below, and nothing held."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from pd_cluster.types import AttemptId, CancelAttempt, IntArray, Route, Sources, StartAttempt
from tests.worker.harness import VOCAB, expected_answer, random_prompt
from tests.worker.tiered import Storage, TieredWorker, TieredWorld


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


def test_decode_has_sent_what_it_is_told_not_to_load() -> None:
    world = make_world(1, pages=240, host=600)
    prompts = [prompt_of(60, seed) for seed in range(8)]
    serve(world, prompts, "cold")
    decode = world.worker("decode-0")
    loaded = world.tiered[1].cache.tier_statistics().host_loaded
    for number, promote in enumerate((False, True)):
        attempt = world.request(prompts[number], name=f"warm{number}")
        start = decode.mailbox.pop()
        assert isinstance(start, StartAttempt)
        decode.mailbox.append(msgspec.structs.replace(start, promote=promote))
        at_rest(world)
        assert world.answer(attempt) == expected_answer(prompts[number], 8)
        resident = {output.resident for output in world.outputs[attempt]}
        assert resident == ({60} if promote else {0})
    assert world.tiered[1].cache.tier_statistics().host_loaded - loaded == 60


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
