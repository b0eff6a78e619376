"""`pd-cluster serve` from the shell, from its start to Ctrl-C."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.serving import PATIENCE_S, eventually, serving

PD_CLUSTER = str(Path(sys.executable).with_name("pd-cluster"))


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("curl") is None, reason="the suggested command needs curl")
def test_serve_answers_and_ends_with_all_that_it_started(smollm2: Path, tmp_path: Path) -> None:
    name = ["--cluster-name", "from-the-shell"]
    with serving([PD_CLUSTER, "serve", *name], tmp_path) as server:
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
        server.interrupt()
        assert server.process.wait(PATIENCE_S) == 0, server.log
        eventually(lambda: not server.left(), lambda: f"still run: {server.left()}")
        gone = ask("status")
        assert gone.returncode == 2
        assert "no cluster 'from-the-shell' is running" in gone.stderr
