"""A cluster on two hosts, brought up by the commands of docs/deploy.md as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.model.store import models_dir
from tests.multihost.hosts import ROOT, Host, Network, network, why_not

# Those in the commands and in configs/ray/on-premise.yaml.
HEAD, WORKER, CLIENT = "10.0.0.1", "10.0.0.2", "10.0.0.3"
URL = f"http://{HEAD}:30000"
# After which a request must have been answered, in one way or another (seconds).
REQUEST_S = 60
# Generous: the machine may be busy with anything.
PATIENCE_S = 240.0

# What a user changes in the files: who logs in, and how pages shall travel. Without the first two,
# UCX would see one machine and go through its memory, or be passed over for plain sockets; by the
# others it writes down what it does.
FABRIC = """\
export PD_TRANSFER_NETWORK=ucx UCX_TLS=tcp,self
export UCX_LOG_LEVEL=debug UCX_PROTO_INFO=y UCX_LOG_FILE=/tmp/ucx-%p.log
"""
CHANGES = {
    "cluster.yaml": ("ssh_user: ubuntu", "ssh_user: root"),
    "configs/ray/env.sh": ("export RAY_AUTH_MODE", f"{FABRIC}export RAY_AUTH_MODE"),
    "configs/ray/serve.yaml": ("host:", f"timeouts: {{request_s: {REQUEST_S}}}\nhost:"),
}


def shell_blocks(heading: str) -> list[str]:
    """The fenced shell commands of one section of docs/deploy.md."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    _, _, section = text.partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """Of /generate: a status, and the body as JSON."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self
        tokens: list[int] = self.body["output_ids"]
        return tokens


@dataclass(frozen=True)
class Deployed:
    """The hosts, and what a client on the third one can do. Commands run in the head's checkout."""

    network: Network
    blocks: list[str]

    @property
    def head(self) -> Host:
        return self.network.hosts[0]

    @property
    def worker(self) -> Host:
        return self.network.hosts[1]

    def run_blocks(self, wanted: Callable[[str], bool]) -> str:
        """Runs the section's blocks, each in a new terminal: so the first one is run in all."""
        first, *others = self.blocks
        shown = ""
        for block in filter(wanted, others):
            started = time.monotonic()
            shown += self.head.run(f"cd ~/checkout\n{first}{block}", timeout=PATIENCE_S)
            print(f"{time.monotonic() - started:.0f} s: {block.splitlines()[0]}")
        return shown

    def ask(self, prompt: Sequence[int], max_tokens: int) -> subprocess.Popen[bytes]:
        """Sends a request from the client's host; `answer` waits for its end."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
        }
        return self._curl(
            "/generate", "--data-binary", json.dumps(body), "--max-time", str(REQUEST_S + 30)
        )

    def answer(self, request: subprocess.Popen[bytes]) -> Answer:
        output, _ = request.communicate(timeout=PATIENCE_S)
        assert request.returncode == 0, f"no answer: curl ended with {request.returncode}"
        body, _, status = output.decode().rpartition("\n")
        return Answer(int(status), json.loads(body))

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return self.answer(self.ask(prompt, max_tokens)).tokens

    def info(self) -> dict[str, Any]:
        answer = self.answer(self._curl("/server_info", "--max-time", "30"))
        assert answer.status == 200, answer
        return answer.body

    def transfer_bytes(self) -> int:
        """That prefill workers have written into the pools of decode workers."""
        return sum(worker["transfer_bytes"] for worker in self.info()["workers"])

    def settle(self) -> None:
        """Waits until nothing is under way; then all pages are free or hold a prefix."""
        gauges = ("private", "in_flight", "protected", "running", "waiting")

        def idle() -> bool:
            return not sum(each[gauge] for each in self.info()["workers"] for gauge in gauges)

        poll(idle, "the cluster is not idle", self.info)
        for each in self.info()["workers"]:
            assert each["free"] + each["evictable"] == each["capacity"], each

    def _curl(self, path: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.network.client,
             "curl", "-s", "--noproxy", "*", "-w", "\n%{http_code}", *options, URL + path],
            stdout=subprocess.PIPE,
        )  # fmt: skip


def poll(condition: Callable[[], bool], complaint: str, detail: Callable[[], Any] = str) -> None:
    """Waits for a state; fails after a generous while."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{complaint}: {detail()}"
        time.sleep(0.2)


def _checkout(host: Host) -> Path:
    """A copy of this project in a user's home on the host."""
    folder = Path(f"/proc/{host.pid}/root{host.home}/checkout")
    folder.mkdir()
    for name in ("pd_cluster", "kernels", "transfer", "configs", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "ray_cluster.yaml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def deployed(smollm2: Path) -> Iterator[Deployed]:
    """Prefill on one host, decode on the other."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"hosts in network namespaces: {reason}")
    with network((HEAD, WORKER), CLIENT, models_dir().parent) as hosts:
        cluster = Deployed(hosts, shell_blocks("Your own hosts"))
        folder = _checkout(cluster.head)
        cluster.run_blocks(lambda block: "cp configs" in block)
        for name, (old, new) in CHANGES.items():
            text = (folder / name).read_text()
            assert old in text, f"{name}: {old}"
            (folder / name).write_text(text.replace(old, new, 1))
        cluster.run_blocks(lambda block: "ray up" in block)
        cluster.run_blocks(lambda block: "pd-cluster serve" in block)
        yield cluster
