"""`pd-cluster serve` from the shell, from its start to its end while streams run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cli.serving import PATIENCE_S, Serving, eventually, serving

PD_CLUSTER = str(Path(sys.executable).with_name("pd-cluster"))
# The short stream's tokens after its first come within the grace time, with much to spare.
GRACE_S, SHORT = 8, 24


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("curl") is None, reason="the suggested command needs curl")
def test_serve_answers_and_ends_with_all_that_it_started(smollm2: Path, tmp_path: Path) -> None:
    name = ["--cluster-name", "from-the-shell"]
    grace = ["--set", f"timeouts.shutdown_s={GRACE_S}"]
    with serving([PD_CLUSTER, "serve", *name, *grace], tmp_path) as server:
        command = server.wait_until_ready()

        def ask(*args: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [PD_CLUSTER, *args, *name],
                env=server.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )

        answered = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        answer = json.loads(answered.stdout)
        assert "Paris" in answer["choices"][0]["message"]["content"]

        status = ask("status", "--json")
        assert status.returncode == 0, (status.stderr, server.log)
        info = json.loads(status.stdout)
        assert info["pid"] == server.process.pid
        assert info["url"] in command
        assert f"pd-cluster is ready at {info['url']}" in server.log
        assert {worker["role"] for worker in info["workers"]} == {"prefill", "decode"}

        table = ask("status")
        assert table.returncode == 0, table.stderr
        assert "prefill-0@" in table.stdout
        assert "decode-0@" in table.stdout

        again = ask("serve")
        assert again.returncode == 2
        assert "is served already" in again.stderr

        server.note_children()
        assert len(server.started) > 4  # Ray's processes, the coordinator, workers, gateway
        end_while_streams_run(server, info["url"])
        eventually(lambda: not server.left(), lambda: f"still run: {server.left()}")
        gone = ask("status")
        assert gone.returncode == 2
        assert "no cluster 'from-the-shell' is running" in gone.stderr


def end_while_streams_run(server: Serving, url: str) -> None:
    """SIGTERM: a stream that ends within its grace time is whole, one that does not gets an error
    event, and new requests a 503. The children have heard of Ctrl-C, as a terminal tells them.
    """
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http, ThreadPoolExecutor(2) as pool:
        short, long = Stream(http, SHORT), Stream(http, 8000)
        reading = [pool.submit(stream.read) for stream in (short, long)]
        eventually(lambda: short.tokens and long.tokens, lambda: server.log)
        for each in server.left():
            if each.pid != server.process.pid:
                each.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        refused: list[httpx.Response] = []

        def is_refused() -> bool:
            refused[:] = [http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})]
            return refused[0].status_code == 503

        eventually(is_refused, lambda: server.log)
        assert refused[0].json()["error"]["code"] == "shutting_down"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        for each in reading:
            each.result(PATIENCE_S)
        assert (short.tokens, short.events[-1]) == (SHORT, "[DONE]")
        assert json.loads(short.events[-2])["choices"][0]["finish_reason"] == "length"
        assert long.tokens < 8000
        assert json.loads(long.events[-1])["error"]["code"] == "shutting_down"
    assert server.process.wait(PATIENCE_S) == 0, server.log
    for line in (
        f"draining 2 requests, for {GRACE_S} s at most",
        "stopping coordinator, prefill-0, decode-0, gateway-0",
        "stopping Ray",
        "pd-cluster has ended",
    ):
        assert line in server.log


class Stream:
    """A completion of so many tokens, each an event."""

    def __init__(self, http: httpx.Client, max_tokens: int) -> None:
        self._http = http
        self._body = {"prompt": "Once", "max_tokens": max_tokens, "stream": True}
        self._body |= {"ignore_eos": True, "logprobs": 0}
        self.events: list[str] = []
        self.tokens = 0

    def read(self) -> None:
        with self._http.stream("POST", "/v1/completions", json=self._body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.tokens += self.events[-1].count('"token_logprobs":[-')
