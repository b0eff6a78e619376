"""Both roles against each other, in virtual time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pd_cluster.types import AttemptId, CancelAttempt, FirstToken, Route, Sources, StartPrefill
from pd_cluster.worker.instructions import GatewayLost
from tests.worker.harness import VOCAB, World, expected_answer, random_prompt

ROUTES: list[Route] = ["remote", "remote+pull", "local"]


def prompt_of(length: int, seed: int = 1) -> np.ndarray:
    rng = random.Random(seed)
    return np.array([rng.randrange(1, VOCAB) for _ in range(length)], np.int32)


def finish(world: World) -> None:
    world.run()
    world.validate()
    assert all(worker.scheduler.idle for worker in world.workers)
    assert not world.transfers


def sources(world: World, attempt: AttemptId) -> Sources:
    found = [output.sources for output in world.outputs[attempt] if output.sources]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_cold_then_warm(page_size: int, length: int) -> None:
    """The second identical request moves no full page and computes one token at least."""
    world = World.make(0, page_size=page_size)
    prompt = prompt_of(length)
    first = world.request(prompt, name="a")
    world.run()
    written = world.worker("prefill-0").scheduler.prefill.written_pages
    assert written == -(-length // page_size)
    second = world.request(prompt, name="b")
    finish(world)
    expected = expected_answer(prompt, 8)
    assert world.answer(first) == world.answer(second) == expected
    assert sources(world, first) == Sources(computed=length)
    full = length // page_size
    cached = min(full * page_size, length - 1)
    assert sources(world, second) == Sources(computed=length - cached, prefill_hit=cached)
    again = world.worker("prefill-0").scheduler.prefill.written_pages - written
    assert again == -(-length // page_size) - full  # only the tail that fills no page
    assert world.outputs[second][0].resident == full * page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_resident_length(page_size: int) -> None:
    """Case 11: prompt lengths around a page against every resident length."""
    for length in (2 * 16 - 1, 2 * 16, 2 * 16 + 1):
        prompt = prompt_of(length)
        for shared in range(length + 1):
            world = World.make(shared, page_size=page_size)
            other = np.concatenate([prompt[:shared], VOCAB + prompt[shared:], [VOCAB]])
            world.request(other.astype(np.int32), name="warm", max_tokens=1)
            world.run()
            before = world.worker("prefill-0").scheduler.prefill.written_pages
            attempt = world.request(prompt, name="a")
            finish(world)
            assert world.answer(attempt) == expected_answer(prompt, 8)
            resident = shared // page_size * page_size
            assert world.outputs[attempt][0].resident == resident
            written = world.worker("prefill-0").scheduler.prefill.written_pages - before
            assert written == -(-length // page_size) - resident // page_size


def test_warm_on_one_side_only() -> None:
    world = World.make(3)
    prompt = prompt_of(60)
    world.request(prompt, name="a")
    world.run()
    world.worker("prefill-0").cache.reset()
    on_decode = world.request(prompt, name="b")
    world.run()
    assert sources(world, on_decode) == Sources(computed=60)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == 60
    world.worker("decode-0").cache.reset()
    on_prefill = world.request(prompt, name="c")
    finish(world)
    assert sources(world, on_prefill) == Sources(computed=1, prefill_hit=59)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == 120
    assert world.answer(on_decode) == world.answer(on_prefill) == expected_answer(prompt, 8)


def test_next_turn_finds_the_answer_on_decode() -> None:
    world = World.make(4)
    prompt = prompt_of(20)
    first = world.request(prompt, name="a", max_tokens=10, ignore_eos=True)
    world.run()
    turn = np.concatenate([prompt, world.answer(first), prompt_of(5, seed=9)]).astype(np.int32)
    second = world.request(turn, name="b")
    finish(world)
    assert world.outputs[second][0].resident == 29  # the answer's last token has no KV
    assert world.answer(second) == expected_answer(turn, 8)


def test_a_shared_prefix_on_its_way_is_awaited_not_sent_twice() -> None:
    world = World.make(5, chunk=16)
    prompt = prompt_of(100)
    other = np.concatenate([prompt[:90], prompt_of(10, seed=8)]).astype(np.int32)
    attempts = [world.request(p, name=str(i)) for i, p in enumerate([prompt, prompt, other])]
    finish(world)
    for attempt, tokens in zip(attempts, [prompt, prompt, other], strict=True):
        assert world.answer(attempt) == expected_answer(tokens, 8)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == 110
    assert world.worker("prefill-0").scheduler.prefill.computed_tokens == 100 + 1 + 10


def test_a_batch_computes_a_shared_prefix_once() -> None:
    """Two decode workers ask for the same prompt at once: prefill computes it once."""
    world = World.make(6, chunk=512, decode=2)
    prompt = prompt_of(100)
    one = world.request(prompt, name="a", decode="decode-0")
    two = world.request(prompt, name="b", decode="decode-1")
    finish(world)
    assert world.answer(one) == world.answer(two) == expected_answer(prompt, 8)
    assert world.worker("prefill-0").scheduler.prefill.computed_tokens == 101


def test_namespaces_do_not_share() -> None:
    world = World.make(7)
    prompt = prompt_of(40)
    world.request(prompt, name="a", namespace="one")
    world.run()
    other = world.request(prompt, name="b", namespace="two")
    finish(world)
    assert sources(world, other) == Sources(computed=40)


def test_max_tokens_one_and_end_of_sequence_at_once() -> None:
    """Case 26, and an answer that ends with its first token: its pages serve the next request."""
    world = World.make(8)
    prompt = prompt_of(30)
    attempt = world.request(prompt, name="a", max_tokens=1)
    world.run()
    assert len(world.answer(attempt)) == 1
    assert world.outputs[attempt][-1].finish_reason == "length"
    again = world.request(prompt, name="b", max_tokens=1)
    finish(world)
    assert world.outputs[again][0].resident == 30


def test_first_token_does_not_wait_for_pages() -> None:
    """Case 29."""
    world = World.make(9)
    attempt = world.request(prompt_of(30), name="a")
    while not world.outputs[attempt]:
        choices = [w for w in world.workers if w.mailbox or not w.scheduler.idle]
        for worker in choices:
            kind = "mail" if worker.mailbox else "compute"
            world._do(kind, worker)
    assert world.transfers
    assert world.worker("decode-0").scheduler.decode.count("landing") == 1
    finish(world)


def test_stale_and_unknown_messages_are_ignored() -> None:
    """Case 9."""
    world = World.make(10)
    attempt = world.request(prompt_of(10), name="a", number=1)
    stale = FirstToken(
        attempt=AttemptId("a", 0), token=3, sources=Sources(computed=10), queue_s=0, prefill_s=0
    )
    world.worker("decode-0").mailbox.append(stale)
    world.worker("decode-0").mailbox.append(CancelAttempt(attempt=AttemptId("zz", 0)))
    finish(world)
    assert not world.outputs[AttemptId("a", 0)]
    assert world.answer(attempt) == expected_answer(prompt_of(10), 8)


def test_a_cancel_that_overtakes_its_start_ends_it_before_it_begins() -> None:
    """Ray keeps no order: a long prompt is passed by the small message that cancels it."""
    world = World.make(14)
    decode = world.worker("decode-0")
    decode.mailbox.append(CancelAttempt(attempt=AttemptId("a", 0)))
    attempt = world.request(prompt_of(10), name="a")
    other = world.request(prompt_of(10), name="a", number=1)
    finish(world)
    (output,) = world.outputs[attempt]
    assert (output.outcome, output.number) == ("aborted", 0)
    assert world.answer(other) == expected_answer(prompt_of(10), 8)


def test_what_comes_again_after_its_end_begins_nothing() -> None:
    """A line that breaks hands back what was taken shortly before, and it is sent once more: by
    then the pages that it names may be another's.
    """
    world = World.make(15)
    decode, prefill = world.worker("decode-0"), world.worker("prefill-0")
    attempt = world.request(prompt_of(10), name="a")
    (start,) = decode.mailbox
    while not prefill.mailbox:
        world._do("mail", decode)
    (ask,) = prefill.mailbox
    assert isinstance(ask, StartPrefill)
    finish(world)
    before = world.answer(attempt), prefill.scheduler.prefill.written_pages
    assert before[0] == expected_answer(prompt_of(10), 8)
    for worker, message in ((prefill, ask), (decode, start), (prefill, ask)):
        worker.mailbox.append(message)
        world._do("mail", worker)
        assert worker.scheduler.idle
        assert not worker.mailbox
    finish(world)
    assert (world.answer(attempt), prefill.scheduler.prefill.written_pages) == before


@pytest.mark.parametrize("how", ["cancelled", "full"])
def test_what_comes_again_after_it_was_turned_away_begins_nothing(how: str) -> None:
    world = World.make(16)
    decode = world.worker("decode-0")
    room = decode.scheduler.decode.max_running
    if how == "cancelled":
        decode.mailbox.append(CancelAttempt(attempt=AttemptId("a", 0)))
        world._do("mail", decode)
    else:
        decode.scheduler.decode.max_running = 0
    attempt = world.request(prompt_of(10), name="a")
    (start,) = decode.mailbox
    world._do("mail", decode)
    decode.scheduler.decode.max_running = room
    decode.mailbox.append(start)
    finish(world)
    (output,) = world.outputs[attempt]
    assert output.outcome == ("aborted" if how == "cancelled" else "refused")


@pytest.mark.parametrize(("step_tokens", "sizes"), [(None, [10]), (25, [10, 10, 5]), (4, [4])])
def test_a_step_has_room_for_chunks_of_several_prompts(
    step_tokens: int | None, sizes: list[int]
) -> None:
    """`chunked_prefill_size` bounds one prompt's part of it, `max_prefill_tokens` all of them."""
    world = World.make(1, chunk=10)
    prefill = world.worker("prefill-0")
    prefill.scheduler.step_tokens = step_tokens or prefill.scheduler.step_tokens
    asked = [world.request(prompt_of(40, seed=seed), name=str(seed)) for seed in range(4)]
    while world.worker("decode-0").mailbox or prefill.mailbox:
        for worker in world.workers:
            if worker.mailbox:
                world._do("mail", worker)
    batch, _ = prefill.scheduler.plan(world.now)
    assert batch is not None
    assert [len(row.tokens) for row in batch.prefill] == sizes
    finish(world)
    for seed, attempt in enumerate(asked):
        assert world.answer(attempt) == expected_answer(prompt_of(40, seed=seed), 8)


def test_memory_pressure_retracts_and_resumes() -> None:
    """Case 13 and 15: answers that outgrow the pool go on later, with the same tokens."""
    world = World.make(11, pages=64)
    prompts = [prompt_of(10, seed=seed) for seed in range(4)]
    unfinished = {i: (0, list[int]()) for i in range(4)}
    attempts = {}
    retracted = 0
    for _ in range(200):
        for i, (number, sent) in list(unfinished.items()):
            if i not in attempts:
                attempts[i] = world.request(
                    prompts[i],
                    name=str(i),
                    number=number,
                    sent=sent,
                    max_tokens=40,
                    ignore_eos=True,
                )
        world.run()
        world.validate()
        for i, attempt in list(attempts.items()):
            del attempts[i]
            number, sent = unfinished[i]
            sent = sent + world.answer(attempt)
            outcome = world.outcome(attempt)
            retracted += outcome == "retracted"
            assert outcome in ("finished", "retracted", "refused")
            unfinished[i] = (number + 1, sent)
            if outcome == "finished":
                assert sent == expected_answer(prompts[i], 40, ignore_eos=True)
                del unfinished[i]
        if not unfinished:
            break
    assert not unfinished
    assert retracted
    finish(world)


def test_deadlines() -> None:
    world = World.make(12)
    decode = world.worker("decode-0")
    attempt = world.request(prompt_of(30), name="a", timeout_s=5)
    world._do("mail", decode)
    world._obey(decode, decode.scheduler.tick(world.now + 4))
    assert world.outcome(attempt) is None
    world._obey(decode, decode.scheduler.tick(world.now + 5))
    assert world.outcome(attempt) == "failed"
    assert decode.cache.counts().in_flight == 30  # until prefill says that nothing can land
    finish(world)


def test_gateway_lost_ends_its_attempts() -> None:
    world = World.make(13)
    for i in range(5):
        world.request(prompt_of(30, seed=i), name=str(i), max_tokens=100, ignore_eos=True)
    for _ in range(40):
        world.step()
    world.worker("decode-0").mailbox.append(GatewayLost("gateway-0"))
    finish(world)
    assert world.worker("decode-0").scheduler.decode.generated_tokens < 500


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_crowd(seed: int, page_size: int) -> None:
    """Cancels at any moment (cases 2, 3, 8), any route, tight memory: exact or cleanly ended."""
    rng = random.Random(seed)
    world = World.make(
        seed,
        pages=rng.choice([128, 256, 1024]),
        page_size=page_size,
        chunk=rng.choice([3, 16, 64]),
        prefill=2,
        decode=2,
    )
    shared: list[np.ndarray] = []
    cancelled: set[AttemptId] = set()
    asked = {}
    for i in range(60):
        prompt = random_prompt(rng, rng.randrange(1, 60), shared)
        decode = f"decode-{rng.randrange(2)}"
        attempt = world.request(
            prompt,
            name=str(i),
            max_tokens=rng.randrange(1, 20),
            decode=decode,
            prefill=f"prefill-{rng.randrange(2)}",
            route=rng.choice(ROUTES),
        )
        asked[attempt] = (prompt, decode)
        for _ in range(rng.randrange(30)):
            world.step()
        if rng.random() < 0.5:
            victim = rng.choice(list(asked))
            cancelled.add(victim)
            world.worker(asked[victim][1]).mailbox.append(CancelAttempt(attempt=victim))
        world.validate()
    finish(world)
    exact = 0
    for attempt, (prompt, _) in asked.items():
        outcome, answer = world.outcome(attempt), world.answer(attempt)
        expected = expected_answer(prompt, 100, ignore_eos=True)
        assert answer == expected[: len(answer)]
        exact += outcome == "finished"
        allowed = {"finished", "refused", "retracted"}
        assert outcome in (allowed | {"aborted", None} if attempt in cancelled else allowed)
    assert exact >= 10


@pytest.mark.parametrize("seed", range(10))
def test_workers_die(seed: int) -> None:
    """A dead worker's peers give back all that it held; the others' answers stay exact."""
    rng = random.Random(seed)
    world = World.make(seed, pages=4096, chunk=16, prefill=2, decode=2)
    asked = {}
    for i in range(30):
        prompt = random_prompt(rng, rng.randrange(1, 60), [])
        prefill, decode = f"prefill-{rng.randrange(2)}", f"decode-{rng.randrange(2)}"
        attempt = world.request(
            prompt, name=str(i), prefill=prefill, decode=decode, route=rng.choice(ROUTES)
        )
        asked[attempt] = (prompt, prefill, decode)
        for _ in range(rng.randrange(20)):
            world.step()
    victim = world.worker(rng.choice(["prefill-0", "decode-0"]))
    world.kill(victim)
    finish(world)
    for attempt, (prompt, prefill, decode) in asked.items():
        answer = world.answer(attempt)
        assert answer == expected_answer(prompt, 8)[: len(answer)]
        if victim.id.name not in (prefill, decode) or (
            world.outcome(attempt) == "finished" and victim.id.name != decode
        ):
            assert world.outcome(attempt) == "finished"
        elif victim.id.name == prefill:
            assert world.outcome(attempt) in ("finished", "failed")


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefill_pulls_what_only_decode_holds(page_size: int) -> None:
    """The next turn by `remote+pull`: the answer's KV is read from decode, the rest computed."""
    world = World.make(20, page_size=page_size)
    prompt = prompt_of(40)
    first = world.request(prompt, name="a", max_tokens=24, ignore_eos=True)
    world.run()
    turn = np.concatenate([prompt, world.answer(first), prompt_of(9, seed=3)]).astype(np.int32)
    before = world.worker("prefill-0").scheduler.prefill.computed_tokens
    second = world.request(turn, name="b", route="remote+pull")
    finish(world)
    assert world.answer(second) == expected_answer(turn, 8)
    resident = 63 // page_size * page_size
    computed = world.worker("prefill-0").scheduler.prefill.computed_tokens - before
    assert computed == len(turn) - resident
    assert sources(world, second) == Sources(
        computed=len(turn) - resident, pulled=resident - 40, prefill_hit=40
    )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_prompt_that_decode_holds_whole_is_pulled_but_for_its_last_page(
    page_size: int, length: int
) -> None:
    world = World.make(21, page_size=page_size)
    prompt = prompt_of(length)
    world.request(prompt, name="a")
    world.run()
    world.worker("prefill-0").cache.reset()
    again = world.request(prompt, name="b", route="remote+pull")
    finish(world)
    assert world.answer(again) == expected_answer(prompt, 8)
    pulled = (length - 1) // page_size * page_size
    assert sources(world, again) == Sources(computed=length - pulled, pulled=pulled)


def test_a_failed_pull_is_computed_instead() -> None:
    world = World.make(22)
    prompt = prompt_of(30)
    world.request(prompt, name="a")
    world.run()
    prefill = world.worker("prefill-0")
    prefill.cache.reset()
    again = world.request(prompt, name="b", route="remote+pull")
    while not world.transfers:
        world.step()
    world.transfers[0].aborted = True
    finish(world)
    assert world.answer(again) == expected_answer(prompt, 8)
    assert sources(world, again) == Sources(computed=30)
    assert prefill.scheduler.prefill.failed_transfers


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_corrupt_pages_are_never_published(max_tokens: int) -> None:
    """The attempt fails and gives all back; another one computes what it needs, and is exact."""
    world = World.make(23)
    world.verify, world.corrupt = True, 1
    prompt = prompt_of(30)
    first = world.request(prompt, name="a", max_tokens=max_tokens)
    finish(world)
    scheduler = world.worker("decode-0").scheduler
    assert scheduler.failed_transfers() == {"corrupt": 1}
    assert scheduler.cache.match(prompt, None, now=world.now, count_hit=False).length == 0
    # One that ended with its first token has its answer, which needed none of the pages.
    assert world.outcome(first) == ("finished" if max_tokens == 1 else "failed")
    again = world.request(prompt, name="a", number=1, max_tokens=max_tokens)
    finish(world)
    assert world.answer(again) == expected_answer(prompt, max_tokens)
    assert scheduler.failed_transfers() == {"corrupt": 1}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shared", [0, 16, 31, 32])
def test_the_local_route_computes_the_tail_on_decode(page_size: int, shared: int) -> None:
    world = World.make(23, page_size=page_size)
    prompt = prompt_of(32)
    if shared:
        world.request(prompt[:shared], name="warm", max_tokens=1)
        world.run()
    written = world.worker("prefill-0").scheduler.prefill.written_pages
    computed = world.worker("prefill-0").scheduler.prefill.computed_tokens
    attempt = world.request(prompt, name="a", route="local")
    finish(world)
    assert world.answer(attempt) == expected_answer(prompt, 8)
    cached = min(shared // page_size * page_size, 31)
    assert sources(world, attempt) == Sources(computed=32 - cached, decode_hit=cached)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == written
    assert world.worker("prefill-0").scheduler.prefill.computed_tokens == computed


def test_identical_short_prompts_are_sent_once() -> None:
    """The sequences of one request share its prompt, however short."""
    world = World.make(24)
    prompt = prompt_of(12)
    attempts = [world.request(prompt, name=str(i)) for i in range(4)]
    finish(world)
    for attempt in attempts:
        assert world.answer(attempt) == expected_answer(prompt, 8)
    assert world.worker("prefill-0").scheduler.prefill.written_pages == 12
    assert world.worker("prefill-0").scheduler.prefill.computed_tokens == 12 + 3
