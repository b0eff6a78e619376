"""`serve --detach` and `down`: what happens around a server in the background, with a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster import operations, registry
from pd_cluster.errors import StartError
from pd_cluster.registry import KnownCluster
from tests.cli.conftest import Run

# A server in the background outlives whoever started it.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

# Stands in for Python and `-m pd_cluster serve ...`: each ends when it is told to.
READY = """
import signal, sys, threading
from pd_cluster import registry
done = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: done.set())
print("asked:", *sys.argv[1:], flush=True)
registry.announce("one", ["http://127.0.0.1:9"], None)
done.wait(60)
{last}
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has `start_detached` run a script; ends it whatever happens."""
    script = tmp_path / "python"
    real = sys.executable

    def use(text: str) -> None:
        script.write_text(f"#!{real}\n{text}")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    yield use
    known = registry.find("one")
    process = None if known is None else known.server.find()
    if process is not None and process.pid != os.getpid():
        process.kill()
        process.wait(10)


def test_it_returns_when_the_server_is_ready_and_down_ends_it(
    python: Callable[[str], None], state_dir: Path
) -> None:
    python(READY.format(last='registry.withdraw("one")'))
    started = operations.start_detached(["--port", "0"], "one", timeout_s=30)
    assert started.url == "http://127.0.0.1:9"
    assert started.is_served
    assert "asked: -m pd_cluster serve --port 0" in registry.log_path("one").read_text()
    assert operations.served("one") == started
    assert operations.take_down("one", timeout_s=30) == "cluster 'one' is down"
    assert not started.is_served
    with pytest.raises(StartError, match="no cluster 'one' is running"):
        operations.served("one")


def test_what_it_said_last_is_the_error(python: Callable[[str], None]) -> None:
    python('import sys; print("loading"); print("error: no room"); sys.exit(2)')
    with pytest.raises(StartError, match="ended with code 2: error: no room"):
        operations.start_detached([], "one", timeout_s=30)


def test_what_does_not_get_ready_is_ended(python: Callable[[str], None]) -> None:
    python("import time; time.sleep(60)")
    with pytest.raises(StartError, match=r"not ready within 0\.3 s; its log is .*one\.log"):
        operations.start_detached([], "one", timeout_s=0.3)


def test_down_says_when_streams_take_longer(python: Callable[[str], None]) -> None:
    python(READY.format(last="import time; time.sleep(60)"))
    started = operations.start_detached([], "one", timeout_s=30)
    with pytest.raises(StartError, match=r"still runs after 0\.3 s; its streams may need longer"):
        operations.take_down("one", timeout_s=0.3)
    assert started.is_served


def test_the_command_line_is_handed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def start(arguments: list[str], name: str, timeout_s: float) -> KnownCluster:
        asked.extend([arguments, name])
        registry.announce(name, ["http://127.0.0.1:9"], None)
        found = registry.find(name)
        assert found is not None
        return found

    monkeypatch.setattr(operations, "start_detached", start)
    done = run("serve", "--detach", "--cluster-name", "two", "--page-size", "4")
    assert done.code == 0, done.err
    assert asked == [["--cluster-name", "two", "--page-size", "4"], "two"]
    assert "serves at http://127.0.0.1:9 in the background" in done.err
    assert "down --cluster-name two" in done.err


def test_watch_shows_it_again_until_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.announce("one", ["http://127.0.0.1:9"], None)
    asked: list[int] = []

    def info(known: KnownCluster) -> dict[str, object]:
        asked.append(len(asked))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"model": f"model-{len(asked)}", "urls": [known.url], "workers": []}

    monkeypatch.setattr(operations, "server_info", info)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    done = run("status", "--cluster-name", "one", "--watch")
    assert done.code == 130
    assert "model-2" in done.out


def test_a_serve_that_was_killed_is_cleared_away_by_the_next(
    run: Run, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it starts: its processes, by their ids."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ended: list[str] = []
        orphan = KnownCluster(
            cluster_name="one",
            server=registry.Process(2**22, 0.0),
            urls=["http://127.0.0.1:9"],
            processes=[registry.Process.of(operations.psutil.Process(left.pid))],
        )
        monkeypatch.setattr(registry, "find", lambda _: orphan)
        monkeypatch.setattr("pd_cluster.cli.serving.run_server", lambda *_: ended.append("served"))
        assert run("serve", "--cluster-name", "one").code == 0
        assert left.poll() is not None
        assert ended == ["served"]
    finally:
        left.kill()
        left.wait()
