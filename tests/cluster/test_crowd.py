"""Many streams at once through two of everything: every output exact, nothing left over."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.conftest import Judge
from tests.cluster.live import PATIENCE_S, Live, live

pytestmark = pytest.mark.cluster

STREAMS, TOKENS = 64, 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with live(prefill=2, decode=2, gateways=2) as running:
        yield running


def stream(url: str, prompt: list[int], together: threading.Barrier) -> list[list[int]]:
    """The output so far, as each event told it."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    together.wait()
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE_S * 2) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not [event for event in events if "error" in event]
    return [event["output_ids"] for event in events]


@pytest.mark.slow
def test_sixty_four_streams_through_two_of_everything(
    cluster: Live, tokenizer: Tokenizer, judge: Judge
) -> None:
    """CI's sample of it: the load of tests/cluster/test_scale.py."""
    names = [f"Letter {index} to my friend in town {index * 37 % 64}:" for index in range(STREAMS)]
    prompts = [tokenizer.encode(name) for name in names]
    first, second = cluster.server.cluster.urls
    together = threading.Barrier(STREAMS)
    with ThreadPoolExecutor(STREAMS) as pool:
        outputs = list(pool.map(stream, [first, second] * 32, prompts, [together] * STREAMS))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output[-1]) == TOKENS
        assert all(output[-1][: len(each)] == each for each in output), "a message went missing"
        judge.check(prompt, output[-1])
    cluster.settle()
    assert all(worker["cache_queries"] for worker in cluster.info()["workers"]), "an idle worker"
