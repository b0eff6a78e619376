"""The numbers of workers change under load: nobody notices but those who look."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.conftest import Judge
from tests.cluster.live import Live, poll

pytestmark = pytest.mark.cluster

TOKENS = 16
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
TEXTS = [
    "The capital of France is",
    "One, two, three, four,",
    "In the beginning there was",
    "def main():\n    ",
]


class Load:
    """Streams, one after the other in each of several threads, until told to stop."""

    def __init__(self, cluster: Live, prompts: list[list[int]]) -> None:
        self.cluster = cluster
        self.answers: list[tuple[list[int], list[int]]] = []
        self._prompts = prompts
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(prompts))
        self._running = [self._pool.submit(self._run, prompt) for prompt in prompts]

    def _run(self, prompt: list[int]) -> None:
        while not self._stop.is_set():
            self.answers.append((prompt, self._stream(prompt)))

    def _stream(self, prompt: list[int]) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "stream": True}
        last: dict[str, Any] = {}
        with self.cluster.http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]", lines[-1]
        last = json.loads(lines[-2].removeprefix("data: "))
        assert "error" not in last, last
        tokens: list[int] = last["output_ids"]
        return tokens

    def wait_for_more(self, count: int) -> None:
        least = len(self.answers) + count
        poll(lambda: self._failed() or len(self.answers) >= least, "the load stands still")

    def stop(self) -> list[tuple[list[int], list[int]]]:
        self._stop.set()
        for each in self._running:
            each.result()
        self._pool.shutdown()
        return self.answers

    def _failed(self) -> bool:
        return any(each.done() for each in self._running)


def scale(cluster: Live, meanwhile: Callable[[], None] = lambda: None, **counts: int) -> None:
    reply = cluster.http.post("/admin/scale", json=counts)
    assert reply.status_code == 202, reply.text
    assert counts.items() <= reply.json()["counts"].items()
    meanwhile()
    poll(lambda: status(cluster)["steady"], "not as wanted", lambda: status(cluster))
    assert not status(cluster)["failure"]


def status(cluster: Live) -> dict[str, Any]:
    found: dict[str, Any] = cluster.http.get("/admin/scale").json()
    return found


def states(cluster: Live) -> dict[str, str]:
    workers = cluster.http.get("/admin/workers").json()["workers"]
    return {each["worker"]["name"]: each["state"] for each in workers}


def test_numbers_change_under_load(cluster: Live, tokenizer: Tokenizer, judge: Judge) -> None:
    load = Load(cluster, [tokenizer.encode(text) for text in TEXTS])
    actors = cluster.server.cluster.actors
    try:
        load.wait_for_more(len(TEXTS))
        scale(cluster, prefill=2, decode=2)
        assert states(cluster) == dict.fromkeys(NAMES, "ready")
        before = work(cluster)
        load.wait_for_more(4 * len(TEXTS))
        done = {name: count - before[name] for name, count in work(cluster).items()}
        cluster.validate()
        leaving = [actors[name] for name in NAMES if name not in ("prefill-0", "decode-0")]
        scale(cluster, prefill=1, decode=1)
        assert states(cluster) == {"prefill-0": "ready", "decode-0": "ready"}
        load.wait_for_more(len(TEXTS))
    finally:
        answers = load.stop()
    for prompt, answer in answers:
        assert len(answer) == TOKENS
        judge.check(prompt, answer)
    # The newcomers' shares of the requests, with four streams at a time: half, more or less.
    assert done["prefill-1"] >= (done["prefill-0"] + done["prefill-1"]) / 5, done
    assert done["decode-1"] >= (done["decode-0"] + done["decode-1"]) / 5, done
    for actor in leaving:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.idle.remote())


def test_a_name_that_was_used_before_is_as_good_as_new(cluster: Live, tokenizer: Tokenizer) -> None:
    """Nobody takes the worker for the one of the same name that is gone."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    for decode in (2, 1, 2):
        scale(cluster, decode=decode)
        assert len(cluster.info()["workers"]) == 1 + decode
    before = cluster.info()["coordinator"]["attempts"]
    cluster.flush()
    cluster.generate_all(prompts, TOKENS, at_once=4, ignore_eos=True)
    cluster.settle()
    after = cluster.info()["coordinator"]["attempts"]
    assert after == {**before, "finished": before["finished"] + len(prompts)}
    assert cluster.server.cluster.actors.keys() >= {"decode-0", "decode-1"}
    assert work(cluster)["decode-1"], "nothing was placed on it"
    scale(cluster, decode=1)


def work(cluster: Live) -> dict[str, int]:
    """Prompts that each prefill worker looked up, tokens that each decode worker generated."""
    actors = cluster.server.cluster.actors
    decode = [name for name in NAMES if name.startswith("decode")]
    prefill = {each["worker"]["name"]: each["cache_queries"] for each in cluster.info()["workers"]}
    counted = {name: ray.get(actors[name].counters.remote()) for name in decode if name in actors}
    return prefill | {name: each["generated_tokens"] for name, each in counted.items()}


def test_what_cannot_be_is_refused(cluster: Live) -> None:
    for path, body, complaint in (
        ("/admin/scale", {"prefill": 0}, "whole number from 1"),
        ("/admin/scale", {"decode": 64, "prefill": 64}, "GiB"),
        ("/admin/workers/decode-0/drain", {}, "decode-0 is the last decode worker"),
    ):
        reply = cluster.http.post(path, json=body)
        assert reply.status_code == 400
        assert complaint in reply.json()["error"]["message"]
    assert cluster.http.post("/admin/workers/decode-9/drain").status_code == 404
    scale(cluster, prefill=1, decode=1)  # as it is
    assert status(cluster)["counts"] == {"prefill": 1, "decode": 1, "gateways": 1}
