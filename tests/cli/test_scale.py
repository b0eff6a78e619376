"""`pd-cluster scale` and `drain` against a server that tells what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pd_cluster import registry, scale_client
from tests.cli.conftest import Run

COUNTS = {"prefill": 2, "decode": 1, "gateways": 1}


def status(steady: bool = True, **changes: Any) -> dict[str, Any]:
    members = {"prefill-0": "serving", "prefill-1": "serving" if steady else "starting"}
    return {"counts": COUNTS, "members": members, "steady": steady, "failure": "", **changes}


class Server(ThreadingHTTPServer):
    """Answers wishes with `taken`, and questions with `told`, one after the other."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, Any, str | None]] = []
        self.taken: tuple[int, dict[str, Any]] = (202, status(steady=False))
        self.told: list[dict[str, Any]] = [status()]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        self._answer(*self.server.taken)

    def do_GET(self) -> None:
        assert self.path == "/admin/scale"
        told = self.server.told
        self._answer(200, told.pop(0) if len(told) > 1 else told[0])

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        registry.announce("pd", [f"http://127.0.0.1:{running.server_port}"], None)
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


def test_scale_waits_until_all_is_as_wanted(run: Run, server: Server) -> None:
    server.told = [status(steady=False), status()]
    done = run("scale", "--prefill", "2", "--admin-key", "s3cret")
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == "2 prefill, 1 decode, 1 gateway"
    (asked,) = server.asked
    wanted = {"prefill": 2, "decode": None, "gateways": None}
    assert asked == ("/admin/scale", wanted, "Bearer s3cret")
    assert len(server.told) == 1


def test_scale_need_not_wait(run: Run, server: Server) -> None:
    server.told = []
    done = run("scale", "--prefill", "2", "--no-wait")
    assert done.code == 0, done.err
    assert done.err.strip() == "2 prefill, 1 decode, 1 gateway (1 starting)"


def test_several_gateways_are_gateways() -> None:
    counts = {**COUNTS, "gateways": 2}
    assert scale_client.describe(status(counts=counts)) == "2 prefill, 1 decode, 2 gateways"


def test_drain_takes_a_name_as_status_shows_it(run: Run, server: Server) -> None:
    assert run("drain", "decode-1@4f1a").code == 0
    assert server.asked == [("/admin/workers/decode-1/drain", {}, None)]


def test_a_refusal_is_one_line(run: Run, server: Server) -> None:
    server.taken = (400, {"error": {"message": "decode-0 is the last decode worker"}})
    done = run("drain", "decode-0")
    assert (done.code, done.error) == (2, "decode-0 is the last decode worker")


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (status(failure="prefill-1 could not start: no room"), "prefill-1 could not start"),
        (status(counts={**COUNTS, "decode": 3}), "meanwhile others were wished: now 2 prefill, 3"),
    ],
)
def test_what_is_not_reached_is_an_error(
    run: Run, server: Server, told: dict[str, Any], complaint: str
) -> None:
    server.told = [told]
    done = run("scale", "--prefill", "2")
    assert done.code == 2
    assert complaint in done.err


def test_without_a_cluster(run: Run) -> None:
    assert "no cluster 'pd' is running" in run("scale", "--decode", "2").error
