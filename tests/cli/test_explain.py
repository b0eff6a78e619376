"""`pd-cluster explain`, against a server that only knows one request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from pd_cluster.cli import app

FOUND = {
    "id": "cmpl-a",
    "sequences": [
        {
            "id": "a.0",
            "state": "finished",
            "attempts": 1,
            "story": [
                {"ago_s": 2.5, "state": "placing", "why": ""},
                {"ago_s": 1.5, "state": "finished", "why": "all is there"},
            ],
            "placements": [
                {
                    "attempt": 1,
                    "prefill": "prefill-1@x",
                    "decode": "decode-0@y",
                    "route": "remote",
                    "queue_s": 0.25,
                    "prefill_s": 0.1,
                    "prefill_held": 640,
                    "decode_held": 64,
                    "candidates": {
                        "prefill": [
                            {"worker": "prefill-0@z", "cost": 0.5, "held": 0, "queue": 0.1},
                            {"worker": "prefill-1@x", "cost": 0.0625, "held": 640, "queue": 0.05},
                        ],
                        "route": [
                            {"worker": "decode-0@y", "cost": 0.07, "held": 64, "remote": 0.07},
                            {"worker": "decode-0@y", "cost": 0.09, "held": 64, "local": 0.09},
                        ],
                    },
                }
            ],
        }
    ],
}


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/admin/requests/cmpl-a"
            allowed = self.headers["authorization"] == "Bearer boss"
            error = {"error": {"message": "a key is needed" if not allowed else "no such request"}}
            body = json.dumps(FOUND if known and allowed else error).encode()
            self.send_response(200 if known and allowed else 404 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def explain(url: str, *arguments: str) -> str:
    outcome = CliRunner().invoke(
        app, ["explain", *arguments, "--url", url, "--admin-key", "boss"], catch_exceptions=False
    )
    assert outcome.exit_code == 0
    return outcome.stdout


def test_each_candidates_terms_are_shown_the_cheapest_first(url: str) -> None:
    shown = explain(url, "cmpl-a")
    assert "attempt 1: remote, prefill prefill-1@x (holds 640 tokens)" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["prefill-1@x", "640", "62.50", "50.00"] in lines
    assert lines.index(["prefill-1@x", "640", "62.50", "50.00"]) < lines.index(
        ["prefill-0@z", "0", "500.00", "100.00"]
    )
    assert ["decode-0@y", "64", "90.00", "-", "90.00"] in lines
    assert "all is there" in shown


def test_json_is_what_the_server_says(url: str) -> None:
    assert json.loads(explain(url, "cmpl-a", "--json")) == FOUND


def test_what_is_not_known_is_an_error_in_the_servers_words(url: str) -> None:
    with pytest.raises(Exception, match="no such request"):
        explain(url, "cmpl-b")
    with pytest.raises(Exception, match="a key is needed"):
        CliRunner().invoke(app, ["explain", "cmpl-a", "--url", url], catch_exceptions=False)
    with pytest.raises(Exception, match="does not answer"):
        explain("http://127.0.0.1:9", "cmpl-a")
