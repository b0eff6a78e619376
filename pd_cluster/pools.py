"""How large the KV pool of each worker is, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from pd_cluster.config import Config
from pd_cluster.errors import ConfigError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.weights import tensor_shapes

# A smaller pool serves nobody (tokens).
LEAST_TOKENS = 16


class KvPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one worker; `source` says what its size follows from."""

    tokens: int
    pages: int
    bytes: int
    source: str


@dataclass(frozen=True)
class Host:
    """Where workers may run: the memory (bytes) that `workers` of them share there."""

    name: str
    memory: int
    workers: int
    of: str = "available memory"


def bytes_per_token(config: Config, model: ModelConfig) -> int:
    return model.kv_elements_per_token * _element(config)


def weights_bytes(config: Config, model: ModelConfig) -> int:
    """What a worker's weights take. A tied head that is packed for bfloat16 is a second copy."""
    shapes = tensor_shapes(model)
    elements = sum(prod(shape) for shape in shapes.values())
    if model.tie_embeddings and config.dtype == "bfloat16":
        elements += model.vocab_size * model.hidden_size
    return elements * _element(config)


def choose_pool(config: Config, model: ModelConfig, hosts: Sequence[Host]) -> KvPool:
    """By `mem_fraction_static` of the host that has least for each worker, where that is set;
    then `max_total_tokens` is the most. All workers have pools of one size.

    Raises ConfigError where weights and a small pool do not fit.
    """
    per_token = bytes_per_token(config, model)
    fraction = config.mem_fraction_static
    tokens, source = config.max_total_tokens, "max_total_tokens"
    if fraction is not None:
        if not hosts:
            raise ConfigError(
                "config key 'mem_fraction_static': no node that may have workers is there yet;"
                " give max_total_tokens"
            )
        host = min(hosts, key=lambda each: each.memory / each.workers)
        weights = weights_bytes(config, model)
        share = int(fraction * host.memory / host.workers)
        fits = max(0, share - weights) // per_token // config.page_size * config.page_size
        said = (
            f"{fraction:g} of {_size(host.memory)} {host.of} on {host.name}, for {host.workers}"
            f" worker{'s' if host.workers > 1 else ''}"
        )
        if fits < max(LEAST_TOKENS, config.page_size):
            raise ConfigError(
                f"config key 'mem_fraction_static': {said}, is {_size(share)} each; the weights"
                f" take {_size(weights)}, and a token's KV {per_token} bytes"
            )
        source = f"mem_fraction_static: {said}, each less {_size(weights)} of weights"
        if "max_total_tokens" in config.model_fields_set and tokens < fits:
            source = f"max_total_tokens; mem_fraction_static has room for {fits}"
        else:
            tokens = fits
    pages = tokens // config.page_size
    return KvPool(tokens=tokens, pages=pages, bytes=tokens * per_token, source=source)


def _element(config: Config) -> int:
    return 4 if config.dtype == "float32" else 2


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
