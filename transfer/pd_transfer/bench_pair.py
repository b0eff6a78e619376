"""The processes of the bench: two a contender, of which only those run whose turn it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

_SCRIPT: Final = Path(__file__).with_name("bench_node.py")


class _Process:
    def __init__(
        self,
        python: str,
        prefix: Sequence[str],
        environment: Mapping[str, str] | None,
        *opening: Any,
    ) -> None:
        self._process = subprocess.Popen(
            # -P: the script's folder is a package's inside, and no place to import from.
            [*prefix, python, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NIXL_LOG_LEVEL": "ERROR", **(environment or {})},
        )
        self.call("open", *opening)

    def call(self, name: str, *arguments: Any) -> Any:
        """
        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process of the bench ended with {self._process.wait()}")
        return json.loads(answer)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """An initiator and a target that have met."""

    def __init__(
        self,
        library: str,
        python: str,
        total: int,
        options: dict[str, Any],
        environment: Mapping[str, str] | None,
        prefixes: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        hosts = options.pop("hosts", ("127.0.0.1", "127.0.0.1"))
        with ExitStack() as stack:
            self.initiator, self.target = (
                self._start(
                    stack,
                    python,
                    prefix,
                    environment,
                    library,
                    role,
                    total,
                    {**options, "host": host},
                )
                for role, prefix, host in zip(("initiator", "target"), prefixes, hosts, strict=True)
            )
            hello = self.target.call("hello")
            self.initiator.call("meet", hello["metadata"], hello["address"])
            self._stack = stack.pop_all()
            self._signal(signal.SIGSTOP)

    @staticmethod
    def _start(
        stack: ExitStack,
        python: str,
        prefix: Sequence[str],
        environment: Mapping[str, str] | None,
        *opening: Any,
    ) -> _Process:
        process = _Process(python, prefix, environment, *opening)
        stack.callback(process.close)
        return process

    @contextmanager
    def running(self) -> Iterator[None]:
        """Otherwise the two are stopped: a contender must not take the others' cores."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def move(
        self, operation: str, size: int, order: str, seed: int, repeats: int = 1
    ) -> list[float]:
        with self.running():
            seconds = self.initiator.call("move", operation, size, order, repeats, seed)
        return [float(each) for each in seconds]

    def cpu(self) -> float:
        with self.running():
            return float(self.initiator.call("cpu") + self.target.call("cpu"))

    def _signal(self, number: signal.Signals) -> None:
        for process in (self.initiator, self.target):
            process.signal(number)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
