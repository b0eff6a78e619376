"""Requests to simulate: read from published traces, or generated.

Token ids stand for content only: equal where the traces say so, else different. So an answer is a
run of one token that is its own, and a block of Mooncake's trace 512 times its id.
"""

from __future__ import annotations

import csv
import json
import random
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from pd_cluster.errors import ConfigError
from pd_cluster.types import IntArray

MOONCAKE_BLOCK = 512
# Answers' token ids begin here, in the order of requests; those of prompts lie below.
ANSWERS = 1 << 30

# (token id, how often): a prompt as runs.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. It arrives at `arrival` (seconds), or `arrival` seconds after the answer to
    request number `after` is complete.
    """

    arrival: float
    prompt: Runs
    max_tokens: int
    answer_token: int
    after: int | None = None
    priority: int = 0

    @property
    def prompt_len(self) -> int:
        return sum(length for _, length in self.prompt)

    def tokens(self) -> IntArray:
        ids, lengths = zip(*self.prompt, strict=True)
        return np.repeat(np.array(ids, np.int32), lengths)


# What a trace may look like, for who gave another one.
FORMATS = (
    "Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids: one for each 512"
    " tokens) or, in a file .csv, Azure's columns (TIMESTAMP, ContextTokens, GeneratedTokens)"
)


def read_trace(path: Path) -> list[TraceRequest]:
    """Mooncake's JSON lines or Azure's CSV, by the file's suffix. Raises ConfigError."""
    try:
        if path.suffix == ".csv":
            return _read_azure(path)
        return _read_mooncake(path)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: not text (UTF-8); expected {FORMATS}") from error
    except (KeyError, ValueError, TypeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"trace {path}: {what[:200]}; expected {FORMATS}") from error


def _read_mooncake(path: Path) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(path.read_text().splitlines()):
        record = json.loads(line)
        length = int(record["input_length"])
        ids = record["hash_ids"]
        if len(ids) != -(-length // MOONCAKE_BLOCK):
            raise ValueError(f"line {number + 1}: {len(ids)} blocks for {length} tokens")
        last = length - (len(ids) - 1) * MOONCAKE_BLOCK
        runs = [(int(each), MOONCAKE_BLOCK) for each in ids[:-1]] + [(int(ids[-1]), last)]
        requests.append(
            TraceRequest(
                arrival=record["timestamp"] / 1000,
                prompt=tuple(runs),
                max_tokens=max(1, int(record["output_length"])),
                answer_token=ANSWERS + number,
            )
        )
    return requests


def _read_azure(path: Path) -> list[TraceRequest]:
    """No content is known: every prompt is its own."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"].strip()) for row in rows]
    return [
        TraceRequest(
            arrival=(time - times[0]).total_seconds(),
            prompt=((number, max(1, int(row["ContextTokens"]))),),
            max_tokens=max(1, int(row["GeneratedTokens"])),
            answer_token=ANSWERS + number,
        )
        for number, (time, row) in enumerate(zip(times, rows, strict=True))
    ]


def scale(requests: list[TraceRequest], rate: int, seconds: float) -> list[TraceRequest]:
    """The first `seconds` of a trace at `rate` times its arrival rate.

    Each request comes `rate` times, spread over the time to the next, with content of its own
    in every copy.
    """
    head = [request for request in requests if request.arrival < seconds]
    ids = 1 + max(token for request in head for token, _ in request.prompt)
    if ids * rate >= ANSWERS:
        raise ConfigError(f"{rate} copies of {ids} blocks are too many")
    rng = random.Random(0)
    copies = [
        replace(
            request,
            arrival=request.arrival + rng.random() * 3.0 if copy else request.arrival,
            prompt=tuple((token + copy * ids, length) for token, length in request.prompt),
        )
        for request in head
        for copy in range(rate)
    ]
    copies.sort(key=lambda request: request.arrival)
    return [replace(each, answer_token=ANSWERS + n) for n, each in enumerate(copies)]


def conversations(
    count: int,
    seed: int,
    *,
    rate: float = 1.0,
    pause_s: float = 10.0,
    turns: tuple[int, int] = (3, 10),
    system: int = 1000,
    message: tuple[int, int] = (50, 2000),
    answers: tuple[int, int] = (50, 800),
) -> list[TraceRequest]:
    """`count` conversations that begin `rate` a second.

    Every prompt contains all earlier turns and their answers, after `system` tokens that all share;
    pauses between an answer and the next turn are exponential. `turns`, and the lengths in tokens
    of messages and answers, are the least and the most.
    """
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    fresh = 1
    start = 0.0
    for _ in range(count):
        start += rng.expovariate(rate)
        prompt: list[tuple[int, int]] = [(0, system)]
        for turn in range(rng.randint(*turns)):
            prompt.append((fresh, rng.randint(*message)))
            fresh += 1
            number = len(requests)
            answer = rng.randint(*answers)
            requests.append(
                TraceRequest(
                    arrival=rng.expovariate(1 / pause_s) if turn else start,
                    prompt=tuple(prompt),
                    max_tokens=answer,
                    answer_token=ANSWERS + number,
                    after=number - 1 if turn else None,
                )
            )
            prompt.append((ANSWERS + number, answer))
    return requests


def lru_hit_rate(requests: list[TraceRequest], pages: int, page_size: int) -> float:
    """The hit rate by tokens of one LRU cache of so many pages, each a whole page of a prompt.

    What placement is measured by: all workers' memory as one, with nothing ever held twice.
    Needs prompts whose runs are whole pages, but for their last.
    """
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = total = 0
    for request in requests:
        keys = []
        prefix = 0
        for token, length in request.prompt:
            if length == page_size:
                prefix = hash((prefix, token))
                keys.append((prefix, token))
        held = 0
        while held < len(keys) and keys[held] in cache:
            held += 1
        hits += min(held * page_size, request.prompt_len - 1)
        total += request.prompt_len
        for key in reversed(keys):  # the longest prefix is the first to go
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > pages:
            cache.popitem(last=False)
    return hits / total if total else 0.0
