"""A burst that shares prefixes, on a real cluster that places by cost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.live import Live, live
from tests.cluster.test_movement import tokens

pytestmark = pytest.mark.cluster
GROUPS, REQUESTS, LENGTH = 8, 64, 96


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with live(placement="cost", schedule_policy="routing-key") as running:
        yield running


def test_a_burst_computes_each_shared_prefix_once(cluster: Live) -> None:
    """64 requests of 8 prefix groups at once, interleaved: the tokens computed are those of the
    prefixes, and at most one a request. Each can say why it was placed where it was.
    """
    groups = [tokens(LENGTH, seed=20 + group) for group in range(GROUPS)]
    before = cluster.moved()

    def ask(number: int) -> dict[str, Any]:
        group = number % GROUPS
        body = {
            "prompt": groups[group] + ([] if number < REQUESTS // 2 else [number]),
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "routing_key": str(group),
        }
        reply = cluster.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    cluster.settle()
    computed = (cluster.moved() - before).computed
    assert GROUPS * LENGTH <= computed <= GROUPS * LENGTH + REQUESTS
    texts = [answer["choices"][0]["text"] for answer in answers[: REQUESTS // 2]]
    assert texts == [texts[index % GROUPS] for index in range(len(texts))]

    story = cluster.http.get(f"/admin/requests/{answers[-1]['id']}").json()
    (placed,) = story["sequences"][0]["placements"]
    best = placed["candidates"]["prefill"][0]
    assert best["worker"].startswith("prefill-0@")
    assert best["cost"] == pytest.approx(best["queue"] + best["compute"] + best["balance"])
    assert placed["candidates"]["decode"][0].keys() >= {"held", "load", "transfer", "wait"}
    assert placed["candidates"]["route"]
