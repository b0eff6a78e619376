"""A worker's engine in a process of its own, with the threads and environment of workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pd_cluster.config import Config

if TYPE_CHECKING:  # which brings torch
    from pd_cluster.worker.engine import Engine

# Answers what comes over the pipe until that is closed: a function at the top of its module.
Task = Callable[[Connection, "Engine"], None]


class EngineProcess:
    """Runs `task` with a warm engine; ready when entered."""

    def __init__(self, config: Config, task: Task) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        arguments = (self._theirs, config.model_dump_json(), task)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)

    def __enter__(self) -> EngineProcess:
        self._process.start()
        self._theirs.close()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def tell(self, order: Any) -> None:
        self._pipe.send(order)

    def ask(self, order: Any) -> Any:
        self.tell(order)
        return self._pipe.recv()


def _serve(pipe: Connection, config_json: str, task: Task) -> None:
    import torch

    from pd_cluster.model.store import resolve_model
    from pd_cluster.worker.engine import Engine

    config = Config.model_validate_json(config_json)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    engine = Engine.load(resolve_model(config.model), config)
    engine.warm_up()
    pipe.send("ready")
    try:
        task(pipe, engine)
    except EOFError:
        pass
