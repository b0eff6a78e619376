"""What a shared prefix saves: time to first token and bytes moved, of a first request and of a
second that shares all of its prompt but the end.
"""

from __future__ import annotations

import http.client
import json
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from pd_cluster.config import load_config
from pd_cluster.errors import StartError
from pd_cluster.serve import Server

SHARED_TOKENS = 1500
OWN_TOKENS = 32
_NEW_TOKENS = 4
# Low ids exist in every vocabulary; the first are control tokens in most.
_TOKEN_IDS = (256, 8192)
_TIMEOUT_S = 300.0


class _Answered(NamedTuple):
    first_token_s: float
    moved_bytes: int
    avoided_bytes: int


def run(url: str | None = None, *, repeats: int = 5) -> dict[str, float]:
    """`prefix.ttft_first_s` and `prefix.ttft_second_s`, medians of `repeats` fresh prefixes.

    `prefix.ttft_ratio` is the median of second by first; `prefix.bytes_first`,
    `prefix.bytes_second` and `prefix.avoided_bytes_second` are the KV that each had moved or, being
    there already, did not have to move. Asks the server at `url`, else a cluster of its own with
    the embedded defaults. Raises StartError where there is no server or it refuses.
    """
    with server(url) as address:
        firsts, seconds = [], []
        # The first pair warms up whatever is made at first use.
        for repeat in range(repeats + 1):
            first, second = _pair(address)
            if repeat:
                firsts.append(first)
                seconds.append(second)
    pairs = zip(firsts, seconds, strict=True)
    return {
        "prefix.ttft_first_s": statistics.median(each.first_token_s for each in firsts),
        "prefix.ttft_second_s": statistics.median(each.first_token_s for each in seconds),
        "prefix.ttft_ratio": statistics.median(b.first_token_s / a.first_token_s for a, b in pairs),
        "prefix.bytes_first": statistics.median(each.moved_bytes for each in firsts),
        "prefix.bytes_second": statistics.median(each.moved_bytes for each in seconds),
        "prefix.avoided_bytes_second": statistics.median(each.avoided_bytes for each in seconds),
    }


def conclusions(figures: dict[str, float]) -> list[str]:
    """What the figures of `run` say, in sentences."""
    ratio = figures["prefix.ttft_ratio"]
    moved = figures["prefix.bytes_second"] / max(1.0, figures["prefix.bytes_first"])
    aim = "as aimed for" if ratio < 0.25 else "above the aim"
    return [
        f"with {SHARED_TOKENS} tokens shared, the first token comes after {ratio:.3f} of the time"
        f" ({aim}: under 0.25), and {moved:.1%} of the bytes move"
    ]


def _pair(url: str) -> tuple[_Answered, _Answered]:
    rng = np.random.default_rng(secrets.randbits(64))
    shared, *own = np.split(
        rng.integers(*_TOKEN_IDS, SHARED_TOKENS + 2 * OWN_TOKENS),
        [SHARED_TOKENS, SHARED_TOKENS + OWN_TOKENS],
    )
    first, second = (_ask(url, [*shared.tolist(), *each.tolist()]) for each in own)
    return first, second


def _ask(url: str, prompt: list[int]) -> _Answered:
    before = _moved(url)
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": _NEW_TOKENS,
            "ignore_eos": True,
        },
    }
    start = time.perf_counter()
    with request(url, "POST", "/generate", json.dumps(body)) as response:
        first_token_s = 0.0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise StartError(f"{url}/generate: {event['error'].get('message')}")
            if not first_token_s and event["output_ids"]:
                first_token_s = time.perf_counter() - start
    after = _moved(url)
    return _Answered(first_token_s, after[0] - before[0], after[1] - before[1])


def _moved(url: str) -> tuple[int, int]:
    """Bytes that all workers have moved, and have not had to move, so far."""
    with request(url, "GET", "/server_info") as response:
        workers = json.load(response)["workers"]
    names = ("transfer_bytes", "transfer_avoided_bytes")
    moved, avoided = (sum(worker[name] for worker in workers) for name in names)
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
