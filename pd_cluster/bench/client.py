"""A cluster of a bench's own, and what a client of it sees."""

from __future__ import annotations

import http.client
import json
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from pd_cluster.config import load_config
from pd_cluster.errors import StartError
from pd_cluster.serve import Server
from pd_cluster.startup import go_ahead

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
    """Greedy, and exactly `new_tokens` long. Raises StartError where the server refuses."""
    answer = Answer(time.perf_counter(), len(prompt))
    with request(url, "POST", "/generate", _body(prompt, new_tokens)) as response:
        read: list[tuple[float, bytes]] = []
        while data := response.read1():
            read.append((time.perf_counter(), data))
    _look_at(answer, url, read)
    return answer


def generate_at_once(url: str, prompts: Sequence[list[int]], new_tokens: int) -> list[Answer]:
    """As `generate`, all at the same time.

    One thread that does nothing but wait and read, on bare sockets, and goes before model steps:
    the client shares its cores with the server, and neither its own work nor its waiting for them
    is what a bench wants to know. What came is looked at when all of it is there.
    """
    with ThreadPoolExecutor(1, initializer=go_ahead) as pool:
        try:
            start, read = pool.submit(_read_all, url, prompts, new_tokens).result()
        except OSError as error:
            raise StartError(f"{url} does not answer: {error}") from error
    answers = [Answer(start, len(prompt)) for prompt in prompts]
    for answer, parts_read in zip(answers, read, strict=True):
        status = parts_read[0][1].split(b"\r\n", 1)[0] if parts_read else b"no answer"
        if b" 200 " not in status:
            raise StartError(f"{url}/generate: {status.decode()}")
        # The lines of the chunked coding lie between events, and are none.
        _look_at(answer, url, parts_read)
        if len(answer.tokens) != new_tokens:
            raise StartError(f"{url}/generate: {len(answer.tokens)} of {new_tokens} tokens came")
    return answers


def _read_all(
    url: str, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[float, list[list[tuple[float, bytes]]]]:
    """When it began, and what came when, for each prompt."""
    parts = urlsplit(url)
    read: list[list[tuple[float, bytes]]] = [[] for _ in prompts]
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for prompt, parts_read in zip(prompts, read, strict=True):
            body = _body(prompt, new_tokens).encode()
            address = parts.hostname, parts.port
            connection = stack.enter_context(socket.create_connection(address, _TIMEOUT_S))
            head = (
                f"POST /generate HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            selector.register(connection, selectors.EVENT_READ, parts_read)
        while selector.get_map():
            if not (ready := selector.select(_TIMEOUT_S)):
                raise TimeoutError(f"nothing came for {_TIMEOUT_S:g} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 20)
                if data:
                    key.data.append((time.perf_counter(), data))
                else:
                    selector.unregister(key.fileobj)
    return start, read


def _body(prompt: list[int], new_tokens: int) -> str:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return json.dumps({"input_ids": prompt, "stream": True, "sampling_params": sampling})


def _look_at(answer: Answer, url: str, read: list[tuple[float, bytes]]) -> None:
    """Into `answer`, by what was read when. Raises StartError for an error event."""
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
