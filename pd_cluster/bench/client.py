"""A cluster of a bench's own, and what a client of it sees."""

from __future__ import annotations

import http.client
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from pd_cluster.config import load_config
from pd_cluster.errors import StartError
from pd_cluster.serve import Server

# Low ids exist in every vocabulary; the first are control tokens in most.
_TOKEN_IDS = (256, 8192)
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Answer:
    """One streamed answer; when it was asked for and when each token came, by `perf_counter`."""

    start: float
    prompt_len: int = 0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # of the prompt's tokens

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.start


def generate(url: str, prompt: list[int], new_tokens: int) -> Answer:
    """Greedy, and exactly `new_tokens` long. Raises StartError where the server refuses.

    What comes is read first and looked at later: the client shares its cores with the server.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "stream": True, "sampling_params": sampling})
    answer = Answer(time.perf_counter(), len(prompt))
    with request(url, "POST", "/generate", body) as response:
        read: list[tuple[float, bytes]] = []
        while data := response.read1():
            read.append((time.perf_counter(), data))
    rest = b""
    for at, data in read:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise StartError(f"{url}/generate: {event['error'].get('message')}")
            answer.tokens = event["output_ids"]
            answer.cached = event["meta_info"]["cached_tokens"]
            answer.times += [at] * (len(answer.tokens) - len(answer.times))
    return answer


def random_tokens(count: int) -> list[int]:
    """A prompt that nobody has asked for before."""
    rng = np.random.default_rng(secrets.randbits(64))
    tokens: list[int] = rng.integers(*_TOKEN_IDS, count).tolist()
    return tokens


def server_info(url: str) -> dict[str, Any]:
    with request(url, "GET", "/server_info") as response:
        info: dict[str, Any] = json.load(response)
    return info


def kv_bytes(info: dict[str, Any]) -> tuple[int, int]:
    """Bytes of KV that all workers have moved, and have not had to move, so far."""
    names = ("transfer_bytes", "transfer_avoided_bytes")
    moved, avoided = (sum(worker[name] for worker in info["workers"]) for name in names)
    return moved, avoided


@contextmanager
def request(
    url: str, method: str, path: str, body: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    if not parts.hostname:
        raise StartError(f"{url} is no URL of a server; expected http://HOST:PORT")
    connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request(
            method, parts.path.rstrip("/") + path, body, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise StartError(f"{url}{path}: {response.status} {response.read().decode()}")
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise StartError(f"{url} does not answer: {error}") from error
    finally:
        connection.close()


@contextmanager
def server(url: str | None, **changes: Any) -> Iterator[str]:
    """The URL of a server: the one given, else of a cluster of its own with the defaults, but for
    `changes`.
    """
    if url is not None:
        yield url
        return
    # Short: Ray's socket paths lie below it.
    temp_dir = tempfile.mkdtemp(prefix="pdb")
    settings = {"port": 0, "cluster_name": f"bench-{secrets.token_hex(4)}", **changes}
    try:
        server = Server.start(load_config(overrides=settings), temp_dir=temp_dir)
        try:
            yield server.url
        finally:
            server.stop()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
