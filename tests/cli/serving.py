"""`pd-cluster serve` as a process of its own, and all that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

# Generous: the machine may be busy with anything.
PATIENCE_S = 240.0


class Serving:
    """A server in a process group of its own, as a shell starts it."""

    def __init__(
        self, command: Sequence[str], folder: Path, scratch: Path, environment: Mapping[str, str]
    ) -> None:
        self._log = scratch / "stderr"
        self.environment = {
            **os.environ,
            "PD_CLUSTER_STATE": str(scratch / "state"),
            "RAY_TMPDIR": str(scratch),
            **environment,
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0"],
                cwd=folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.started = {psutil.Process(self.process.pid)}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> str:
        """The shell command that the server suggests."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # or its end, if the server ends
        assert line, self.log
        self.note_children()
        return line

    def note_children(self) -> None:
        self.started |= set(psutil.Process(self.process.pid).children(recursive=True))

    def left(self) -> list[psutil.Process]:
        """Those of all processes ever seen that still run."""
        return [each for each in self.started if _runs(each)]

    def kill(self) -> None:
        try:
            self.note_children()
        except psutil.NoSuchProcess:
            pass
        for each in self.left():
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.communicate()


@contextmanager
def serving(command: Sequence[str], folder: Path, **environment: str) -> Iterator[Serving]:
    """Starts `command --port 0` in `folder`; whatever it started ends with the context."""
    # Short: Ray's socket paths lie below it.
    scratch = Path(tempfile.mkdtemp(prefix="pdc"))
    try:
        server = Serving(command, folder, scratch, environment)
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def eventually(condition: Callable[[], bool], complaint: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, complaint()
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    # A zombie has ended; whether init has collected it yet is not ours to know.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
