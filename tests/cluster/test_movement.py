"""Invariants 4 and 6 on a real cluster: what moves, what is cached, what aborts leave behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.live import Live, live, poll

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    """By route `remote` alone: what is not on decode is sent there."""
    with live(placement="least_loaded") as running:
        yield running


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(count)]


def test_a_second_identical_request_moves_no_page(cluster: Live) -> None:
    prompt = tokens(300, seed=1)
    first = cluster.generate(prompt)
    before, sent = cluster.moved(), transfer_bytes(cluster)
    second = cluster.generate(prompt)
    cluster.settle()
    moved = cluster.moved() - before
    assert moved.written_pages == 0
    assert transfer_bytes(cluster) == sent
    assert (first.cached_tokens, second.cached_tokens) == (0, 299)
    assert first.tokens == second.tokens


def test_only_the_new_tokens_of_a_shared_prefix_move(cluster: Live) -> None:
    shared = tokens(1000, seed=2)
    cluster.generate(shared + tokens(100, seed=3))
    cluster.settle()
    before, sent = cluster.moved(), transfer_bytes(cluster)
    answer = cluster.generate(shared + tokens(100, seed=4))
    cluster.settle()
    moved = cluster.moved() - before
    assert moved.written_pages == 100
    assert moved.resident_pages == 1000
    assert moved.computed == 100
    assert answer.cached_tokens == 1000
    page_bytes = 2 * 30 * 3 * 64 * 4  # K and V of 30 layers, 3 heads of 64, float32
    assert transfer_bytes(cluster) - sent == 100 * page_bytes


def test_namespaces_do_not_share(cluster: Live) -> None:
    prompt = tokens(50, seed=5)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    answers = [
        cluster.http.post("/v1/completions", json={**body, "cache_salt": salt}).json()
        for salt in ("one", "two", "one")
    ]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached == [0, 0, 49]


@pytest.mark.slow  # test_retraction.py has memory pressure in every run
def test_memory_pressure_loses_no_request(cluster: Live) -> None:
    """Demand far above the pool: answers wait, evict and resume, and all of them are exact."""
    prompts = [tokens(1500, seed=100 + i) for i in range(14)]
    answers = cluster.generate_all(prompts, 4, 14, ignore_eos=True)
    assert all(len(answer.tokens) == 4 for answer in answers)
    cluster.settle()
    again = cluster.generate(prompts[0], 4, ignore_eos=True)
    assert again.tokens == answers[0].tokens


def test_a_thousand_aborts_leave_every_pool_as_it_was(cluster: Live) -> None:
    """Clients hang up at random moments, of all states; afterwards nothing is held anywhere."""
    shared = tokens(200, seed=6)
    total = 1000

    def hang_up(index: int) -> bool:
        rng = random.Random(index)
        prompt = shared[: rng.randrange(1, 200)] + tokens(rng.randrange(1, 40), seed=index)
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "stream": True}
        # Most leave while the prompt waits, is computed or is on its way; some in mid-stream.
        patience = rng.choice([0.001, 0.01, 0.03, 0.1, 0.3, 1.0])
        timeout = httpx.Timeout(60.0, read=patience)
        try:
            with cluster.http.stream("POST", "/v1/completions", json=body, timeout=timeout) as r:
                for number, _ in enumerate(r.iter_lines()):
                    if number > rng.randrange(30):
                        return True
        except httpx.ReadTimeout:
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        aborted = sum(pool.map(hang_up, range(total)))
    assert aborted > total / 2
    cluster.settle()
    cluster.flush()
    info = cluster.info()
    assert info["coordinator"]["running"] == info["coordinator"]["waiting"] == 0
    answer = cluster.generate(shared, 4)
    assert len(answer.tokens) == 4


def test_a_disconnect_stops_the_work_on_both_sides(cluster: Live) -> None:
    """Cases 1 and 5: a very long prompt's client leaves; a short one behind it is served."""
    long = tokens(7000, seed=7)
    before = cluster.moved()
    timeout = httpx.Timeout(60.0, read=0.5)
    with pytest.raises(httpx.ReadTimeout):
        cluster.http.post(
            "/v1/completions", json={"prompt": long, "max_tokens": 500}, timeout=timeout
        )
    cluster.settle()
    computed = (cluster.moved() - before).computed
    assert computed < 7000
    assert len(cluster.generate(tokens(10, seed=8), 4, ignore_eos=True).tokens) == 4


def transfer_bytes(cluster: Live) -> int:
    poll(lambda: not any(w["in_flight"] for w in cluster.info()["workers"]), "pages in flight")
    return sum(int(worker["transfer_bytes"]) for worker in cluster.info()["workers"])
