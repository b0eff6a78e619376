"""What `pd-cluster serve` does: checks everything that can be checked, then starts a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

import pd_kernels
from pd_cluster.cache.check import check_cache
from pd_cluster.cluster import Cluster, init_ray
from pd_cluster.config import Config
from pd_cluster.errors import ConfigError, StartError
from pd_cluster.gateway.actor import bind
from pd_cluster.model.config import ModelConfig, load_config
from pd_cluster.model.store import resolve_model
from pd_cluster.model.weights import Weights
from pd_cluster.nodes import capacity
from pd_cluster.scaling import Counts
from pd_cluster.worker.transfer_agent import require_backend


class Server:
    """A cluster that this process started, and the Ray under it if that was started too."""

    def __init__(self, config: Config, model: ModelConfig, model_id: str, cluster: Cluster) -> None:
        self.config = config
        self.model = model
        self.model_id = model_id
        self.cluster = cluster

    @classmethod
    def start(
        cls,
        config: Config,
        address: str | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        temp_dir: str | None = None,
    ) -> Server:
        """Raises ConfigError, ModelError or StartError, each in one line, and leaves nothing
        behind.
        """
        check_cache(config)
        if address is None:
            # Before the slow part: are the ports free, and the library there?
            _check_ports(config)
            require_backend(config.transfer.backend)
        progress("fetching the model")
        folder = resolve_model(config.model)
        model = check_model(folder)
        if config.context_length and config.context_length > model.max_positions:
            raise ConfigError(
                f"config key 'context_length': {config.context_length} is more than the model's"
                f" {model.max_positions} positions"
            )
        check_memory(config, model)
        progress("preparing the kernels")
        pd_kernels.warm_up()
        progress("starting Ray")
        init_ray(address, temp_dir)
        model_id = config.model if not Path(config.model).exists() else folder.name
        try:
            cluster = Cluster.start(
                config,
                folder,
                model_id,
                local=address is None,
                objection=_objection(config, model) if address is None else lambda _: None,
                progress=progress,
            )
        except BaseException:
            ray.shutdown()
            raise
        return cls(config, model, model_id, cluster)

    @property
    def url(self) -> str:
        """Of the first gateway."""
        return self.cluster.urls[0]

    def describe(self) -> list[str]:
        """What was chosen, for the person who started it."""
        config, model = self.config, self.model
        element = 4 if config.dtype == "float32" else 2
        per_token = model.kv_elements_per_token * element
        pool = config.max_total_tokens * per_token / 2**20
        return [
            f"model {self.model_id} ({config.dtype}), context"
            f" {config.context_length or model.max_positions} tokens,"
            f" kernels: {pd_kernels.backend_name('cpu')}",
            f"{config.prefill} prefill and {config.decode} decode worker(s), each with a KV pool of"
            f" {config.max_total_tokens} tokens ({pool:.0f} MiB) in pages of {config.page_size},"
            f" {config.layout}",
        ]

    def example(self) -> str:
        """A shell command that talks to the server."""
        body = {
            "model": self.config.served_model_name or self.model_id,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        key = " -H 'Authorization: Bearer YOUR-KEY'" if self.config.api_keys else ""
        return (
            f"curl -s {self.url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
            f" -d '{json.dumps(body)}'"
        )

    def check(self) -> None:
        """Looks after the gateways. Raises StartError if the Ray under the cluster is gone."""
        if not ray.is_initialized():
            raise StartError("Ray has ended under the cluster")
        self.cluster.keep_serving()

    def stop(self) -> None:
        self.cluster.stop()
        ray.shutdown()


def _objection(config: Config, model: ModelConfig) -> Callable[[Counts], str | None]:
    """Why this one machine cannot have so many workers. On several, one waits for a node that has
    room, which an autoscaler may be about to add.
    """

    def objection(counts: Counts) -> str | None:
        list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        nodes = [node["Resources"] for node in list_nodes() if node["Alive"]]
        for role, count in (("prefill", counts.prefill), ("decode", counts.decode)):
            most = capacity(getattr(config.resources, role), nodes)
            if most is not None and count > most:
                return f"this machine has room for {most} {role} workers, not for {count}"
        pools = (counts.prefill + counts.decode) * _pool_bytes(config, model)
        memory = psutil.virtual_memory().total
        if pools > memory:
            return (
                f"the KV pools of {counts.prefill + counts.decode} workers take"
                f" {pools / 2**30:.1f} GiB; this machine has {memory / 2**30:.1f} GiB"
            )
        return None

    return objection


def _pool_bytes(config: Config, model: ModelConfig) -> int:
    element = 4 if config.dtype == "float32" else 2
    return config.max_total_tokens * model.kv_elements_per_token * element


def check_memory(config: Config, model: ModelConfig) -> None:
    """Raises ConfigError where the KV pools of one worker alone exceed this machine's memory."""
    pool = _pool_bytes(config, model)
    memory = psutil.virtual_memory().total
    if pool > memory:
        raise ConfigError(
            f"config key 'max_total_tokens': {config.max_total_tokens} tokens take"
            f" {pool / 2**30:.1f} GiB in each worker; this machine has {memory / 2**30:.1f} GiB"
        )


def check_model(folder: Path) -> ModelConfig:
    """Raises ModelError for a model that cannot be served, without loading its weights."""
    model = load_config(folder)
    Weights(folder, model, torch.float32, "cpu")
    return model


def _check_ports(config: Config) -> None:
    """Raises ConfigError or StartError where the HTTP servers could not listen."""
    ports = [config.port + index for index in range(config.gateways if config.port else 0)]
    if config.metrics_port in ports:
        raise ConfigError(f"config key 'metrics_port': {config.metrics_port} is a gateway's port")
    for port in ports:
        bind(config.host, port).close()
    if config.metrics_port:
        try:
            bind(config.host, config.metrics_port).close()
        except StartError as error:
            raise StartError(f"metrics_port: {error}") from error
