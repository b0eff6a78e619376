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
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.model.weights import Weights
from pd_cluster.nodes import capacity, gpu_memory, hosts_for
from pd_cluster.pools import KvPool, bytes_per_token, choose_pool
from pd_cluster.scaling import Counts
from pd_cluster.worker.engine import pick_device
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
            # Before the slow part: are the ports free, the library and the device there?
            pick_device(config.device)
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
        if config.chat_template is not None:
            Tokenizer(folder, config.chat_template)  # which says what is wrong with it
        local = address is None
        if local:  # before anything of ours takes memory
            pool = _choose_pool(config, model, local=True)
        progress("preparing the kernels")
        pd_kernels.warm_up()
        progress("starting Ray")
        init_ray(address, temp_dir)
        model_id = config.model if not Path(config.model).exists() else folder.name
        try:
            if not local:
                pool = _choose_pool(config, model, local=False)
            config = config.model_copy(update={"max_total_tokens": pool.tokens})
            cluster = Cluster.start(
                config,
                folder,
                model_id,
                pool,
                local=local,
                objection=_objection(config, model) if local else lambda _: None,
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
        config, model, pool = self.config, self.model, self.cluster.spec.kv_pool
        return [
            f"model {self.model_id} ({config.dtype}), context"
            f" {config.context_length or model.max_positions} tokens,"
            f" kernels: {pd_kernels.backend_name('cuda' if gpu_memory(config.device) else 'cpu')}",
            *(
                f"{count} {role} worker{'s' if count > 1 else ''}: KV pool of {pool.tokens} tokens,"
                f" {pool.bytes / 2**20:.0f} MiB in {pool.pages} pages of {config.page_size}"
                f" ({config.layout}){' each' if count > 1 else ''}"
                for role, count in (("prefill", config.prefill), ("decode", config.decode))
            ),
            f"pools sized by {pool.source}",
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

    def stop(self, *, progress: Callable[[str], None] = lambda _: None) -> None:
        """Streams may finish within their grace time; then all ends that was started."""
        self.cluster.stop(progress=progress)
        progress("stopping Ray" if self.cluster.spec.local else "leaving Ray")
        ray.shutdown()


def _objection(config: Config, model: ModelConfig) -> Callable[[Counts], str | None]:
    """Why this one machine cannot have so many workers. On several, one waits for a node that has
    room, which an autoscaler may be about to add.
    """

    pool_bytes = config.max_total_tokens * bytes_per_token(config, model)

    def objection(counts: Counts) -> str | None:
        list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        nodes = [node["Resources"] for node in list_nodes() if node["Alive"]]
        for role, count in (("prefill", counts.prefill), ("decode", counts.decode)):
            most = capacity(config.needs(role), nodes)
            if most is not None and count > most:
                return f"this machine has room for {most} {role} workers, not for {count}"
        pools = (counts.prefill + counts.decode) * pool_bytes
        memory = _memory_here(config)
        if pools > memory:
            return (
                f"the KV pools of {counts.prefill + counts.decode} workers take"
                f" {pools / 2**30:.1f} GiB; this machine has {memory / 2**30:.1f} GiB"
            )
        return None

    return objection


def _choose_pool(config: Config, model: ModelConfig, *, local: bool) -> KvPool:
    """Raises ConfigError where the pool of one worker alone exceeds this machine's memory."""
    hosts = [] if config.mem_fraction_static is None else hosts_for(config, local=local)
    pool = choose_pool(config, model, hosts)
    memory = _memory_here(config)
    if local and pool.bytes > memory:
        raise ConfigError(
            f"config key 'max_total_tokens': {config.max_total_tokens} tokens take"
            f" {pool.bytes / 2**30:.1f} GiB in each worker; this machine has"
            f" {memory / 2**30:.1f} GiB"
        )
    return pool


def _memory_here(config: Config) -> int:
    """Bytes, all in all, where this machine's workers have their pools."""
    gpus = sum(total for _, total in gpu_memory(config.device))
    return gpus or psutil.virtual_memory().total


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
