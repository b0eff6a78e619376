"""Models of the Hub, from one on the loopback and from its cache without any."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from pd_cluster.errors import ModelError
from pd_cluster.model.config import load_config
from pd_cluster.model.hub import is_hub_id
from pd_cluster.model.store import resolve_model
from pd_cluster.model.weights import Weights
from tests.model.tiny import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = {"model.safetensors.index.json"} | {
    f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)
}


class FakeHub(ThreadingHTTPServer):
    """One model, `someone/tiny`; `someone/gated` asks for consent, `someone/broken` fails."""

    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.sent: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        files = sorted(each for each in self.server.files.rglob("*") if each.is_file())
        names = [str(each.relative_to(self.server.files)) for each in files]
        prefix = f"/someone/tiny/resolve/{COMMIT}/"
        if "someone/gated" in path:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        elif "someone/broken" in path:
            self._send(418, b"", {}, with_body)
        elif path == "/api/models/someone/tiny/revision/main":
            self._send(200, json.dumps({"id": "someone/tiny", "sha": COMMIT}).encode(), {}, True)
        elif path == f"/api/models/someone/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in zip(names, files, strict=True)
            ]
            self._send(200, json.dumps(tree).encode(), {}, True)
        elif path.startswith(prefix) and (name := path.removeprefix(prefix)) in names:
            body = (self.server.files / name).read_bytes()
            etag = hashlib.sha1(body).hexdigest()
            self._send(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, with_body)
            if with_body:
                self.server.sent.append(name)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A repository as there are many: sharded, and the same weights in other forms."""
    folder = tmp_path / "original"
    save_tiny(folder, family="qwen3", head_dim=16, shard_size="150KB")
    (folder / "original").mkdir()
    for name in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "original/a.json"):
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def hub(original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub(original)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    # The client keeps its connections, and reads the proxies when it makes them.
    huggingface_hub.close_session()
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_downloaded_once_and_only_what_is_read(hub: FakeHub, cache: Path) -> None:
    folder = resolve_model("someone/tiny", progress=False)
    assert cache in folder.parents
    assert Weights(folder, load_config(folder), torch.float32).layer(2).q_norm is not None
    expected = {"config.json", "generation_config.json", *SHARDS}
    assert set(hub.sent) == expected | {"additional_chat_templates/tool_use.jinja"}
    hub.sent.clear()
    assert resolve_model("someone/tiny", progress=False) == folder
    assert hub.sent == []


def test_a_cached_model_needs_no_hub(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("someone/tiny", progress=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("someone/tiny", progress=False) == folder
    with pytest.raises(ModelError) as caught:
        resolve_model("someone/other")
    assert str(caught.value) == (
        f"model someone/other: not whole in the cache {cache}, and HF_HUB_OFFLINE is set"
    )


def test_half_a_model_is_none(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("someone/tiny", progress=False)
    (folder / "model-00002-of-00004.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not whole in the cache"):
        resolve_model("someone/tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", "its owner asks for consent first: give it at {url}/someone/gated, then set"),
        ("nothing", "{url} knows no such model, or it is private and HF_TOKEN does not open it"),
        ("broken", "{url} cannot be reached (Client error '418 "),
    ],
)
def test_what_the_hub_refuses(hub: FakeHub, name: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(f"someone/{name}")
    assert message.format(url=hub.url) in str(caught.value)
    assert str(caught.value).startswith(f"model someone/{name}: ")
    assert "\n" not in str(caught.value)


def test_nobody_listens(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9 cannot be reached \(.*refused"):
        resolve_model("someone/tiny")


def test_environment_variables_name_the_cache(original: Path, tmp_path: Path) -> None:
    """A cache as the client lays it out, made by hand, and a process that may ask nobody."""
    repository = tmp_path / "home" / "hub" / "models--someone--tiny"
    (repository / "snapshots").mkdir(parents=True)
    original.rename(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    script = (
        "from pd_cluster.model.store import resolve_model; print(resolve_model('someone/tiny'))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(repository / "snapshots" / COMMIT)


@pytest.mark.parametrize("name", ["tiny", "/a/b", "a/b/c", "../b", "a/", "a b/c", "./a"])
def test_names_that_are_no_hub_ids(name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(ModelError, match=r"nor a Hub id \(organisation/model\)"):
        resolve_model(name)
