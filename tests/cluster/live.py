"""A real cluster for tests: Ray, worker processes, UCX and HTTP, as `pd-cluster serve` has them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray

from pd_cluster.config import Config, load_config
from pd_cluster.serve import Server

# Generous: the machine may be busy with anything.
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Generated:
    """An answer of /generate."""

    tokens: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: dict[str, Any]
    id: str


@dataclass(frozen=True)
class Moved:
    """Totals over all workers of a role's counters; lengths in tokens."""

    computed: int
    prefill_hits: int
    written_pages: int
    resident_pages: int

    def __sub__(self, other: Moved) -> Moved:
        return Moved(
            self.computed - other.computed,
            self.prefill_hits - other.prefill_hits,
            self.written_pages - other.written_pages,
            self.resident_pages - other.resident_pages,
        )


class Live:
    """A running cluster and an HTTP client of it."""

    def __init__(self, server: Server, progress: Sequence[str] = ()) -> None:
        self.server = server
        self.progress = progress
        self.config: Config = server.config
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE_S * 2)

    def generate(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> Generated:
        params = {"temperature": 0, "max_new_tokens": max_tokens, **sampling}
        body = {"input_ids": list(prompt), "sampling_params": params}
        reply = self.http.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        meta = answer["meta_info"]
        return Generated(
            answer["output_ids"],
            answer["text"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
            meta["finish_reason"],
            meta["id"],
        )

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int, **sampling: Any
    ) -> list[Generated]:
        with ThreadPoolExecutor(at_once) as pool:
            ask = lambda prompt: self.generate(prompt, max_tokens, **sampling)  # noqa: E731
            return list(pool.map(ask, prompts))

    def flush(self, role: str | None = None) -> None:
        self.settle()
        reply = self.http.post("/flush_cache", params={"role": role} if role else {})
        assert reply.status_code == 200, reply.text
        for worker in self.info()["workers"]:
            if role in (None, worker["role"]):
                assert worker["free"] == worker["capacity"], worker

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.http.get("/server_info").json()
        return info

    def scrape(self) -> str:
        """The whole cluster's metrics."""
        reply = self.http.get(self.info()["coordinator"]["metrics_url"])
        assert reply.status_code == 200, reply.text
        text: str = reply.text
        return text

    def moved(self) -> Moved:
        counters = [
            ray.get(actor.counters.remote())
            for name, actor in self.server.cluster.actors.items()
            if name.startswith(("prefill", "decode"))
        ]
        names = ("computed_tokens", "prefill_hit_tokens", "written_pages", "resident_pages")
        return Moved(*(sum(counter[name] for counter in counters) for name in names))

    def settle(self) -> None:
        """Waits until nothing is under way, then checks every invariant on every worker."""

        def idle() -> bool:
            info = self.info()
            coordinator = info["coordinator"]
            gauges = ("private", "in_flight", "protected", "running", "waiting")
            busy = sum(worker[gauge] for worker in info["workers"] for gauge in gauges)
            return not busy + coordinator["waiting"] + coordinator["running"]

        poll(idle, "the cluster is not idle", self.info)
        self.validate()

    def validate(self) -> None:
        for name, actor in self.server.cluster.actors.items():
            if name.startswith(("prefill", "decode")):
                ray.get(actor.validate.remote())

    def close(self) -> None:
        self.http.close()
        self.server.stop()


def poll(condition: Callable[[], bool], complaint: str, detail: Callable[[], Any] = str) -> None:
    """Waits for a state; fails after a generous while."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{complaint}: {detail()}"
        time.sleep(0.05)


@contextmanager
def live(**settings: Any) -> Iterator[Live]:
    """A cluster of its own, on any free port, stopped again whatever happens."""
    # Short: Ray's socket paths lie below it.
    temp_dir = tempfile.mkdtemp(prefix="pdt")
    overrides = {
        "port": 0,
        "dtype": "float32",
        "max_total_tokens": 16384,
        "cluster_name": Path(temp_dir).name.lower().replace("_", "-"),
        **settings,
    }
    try:
        progress: list[str] = []
        config = load_config(overrides=overrides)
        server = Server.start(config, temp_dir=temp_dir, progress=progress.append)
        cluster = Live(server, progress)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
