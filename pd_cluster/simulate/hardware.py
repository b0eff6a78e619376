"""How long a step and a transfer take on some hardware: rooflines, in seconds.

    step      overhead + max(c, m) + (1 - overlap) min(c, m) + attention FLOPs / F + KV / B
              c = linear FLOPs / F, m = weights / B
    transfer  latency + bytes / NIC, one after another on each NIC it goes through
    tier      bytes / host, one after another

FLOPs and bytes; F and B are what is reached of the peaks (`flops_efficiency`, `memory_efficiency`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from pd_cluster.errors import ConfigError
from pd_cluster.worker.instructions import Batch, Row


@dataclass(frozen=True, slots=True)
class Hardware:
    """One worker's accelerator and NIC; FLOP/s, bytes, bytes/s and seconds.

    `memory` less a tenth holds the weights and, where nobody says otherwise, KV pages. `overlap` is
    the part of computing and of reading weights that goes on while the other does: 1 on a GPU, 0
    on a core that does either.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    nic_bandwidth: float
    nic_latency_s: float = 20e-6
    flops_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    step_overhead_s: float = 1e-3
    overlap: float = 1.0
    host_bandwidth: float = 25e9  # between the KV pool and host memory, either way


HARDWARE = {
    "h200": Hardware(
        flops=989e12,
        memory_bandwidth=4.8e12,
        memory=141e9,
        nic_bandwidth=50e9,
        host_bandwidth=50e9,
    ),
    "h100": Hardware(
        flops=989e12,
        memory_bandwidth=3.35e12,
        memory=80e9,
        nic_bandwidth=50e9,
        host_bandwidth=50e9,
    ),
    "a100": Hardware(flops=312e12, memory_bandwidth=2.04e12, memory=80e9, nic_bandwidth=25e9),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides about time; dtype_bytes holds for weights and KV."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Parameters of all layers, embeddings left out."""
        width = self.heads * self.head_dim
        attention = self.hidden * (2 * width + 2 * self.kv_heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


MODELS = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152),
}


class StepTimes:
    """Times of one model on one kind of hardware."""

    def __init__(self, hardware: Hardware, model: ModelShape) -> None:
        self.hardware = hardware
        self.model = model
        flops = hardware.flops * hardware.flops_efficiency
        bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
        weights = (model.layer_weights + model.head_weights) * model.dtype_bytes
        embedding = model.head_weights * model.dtype_bytes  # held, but never read as a whole
        self._free_bytes = 0.9 * hardware.memory - weights - embedding
        self.overhead_s = hardware.step_overhead_s
        self.weights_s = weights / bandwidth
        self.token_s = 2 * model.layer_weights / flops
        self.sampled_s = 2 * model.head_weights / flops
        # One token that attends to one: scores and values, all layers.
        self.attended_s = 4 * model.layers * model.heads * model.head_dim / flops
        self.kv_token_s = model.kv_bytes_per_token / bandwidth

    def pages(self, page_size: int) -> int:
        """KV pages of so many tokens that fit beside the weights; 0 if those do not fit."""
        page_bytes = page_size * self.model.kv_bytes_per_token
        return max(0, int(self._free_bytes // page_bytes))

    def step_s(self, batch: Batch) -> float:
        """One step of the engine."""
        tokens = sampled = held = len(batch.decode)
        for row in batch.decode:
            held += row.start
        seconds = self.overhead_s + held * self.kv_token_s
        if batch.prefill:
            tokens += sum(len(row.tokens) for row in batch.prefill)
            sampled += sum(row.draw is not None for row in batch.prefill)
            seconds += attended(batch.prefill) * self.attended_s
        return seconds + self._linear_s(tokens, sampled)

    def decode_steps_s(self, sequences: int, held: int, steps: int) -> NDArray[np.float64]:
        """Successive steps of so many sequences, which hold `held` tokens before the first."""
        held_at = held + sequences + sequences * np.arange(steps)
        seconds = self.overhead_s + held_at * self.kv_token_s
        return np.asarray(seconds + self._linear_s(sequences, sequences), np.float64)

    def _linear_s(self, tokens: int, sampled: int) -> float:
        compute = tokens * self.token_s + sampled * self.sampled_s
        apart = 1 - self.hardware.overlap
        return max(compute, self.weights_s) + apart * min(compute, self.weights_s)

    def prefill_prior(self) -> tuple[float, float, float]:
        """(per step, per token, per token attended): what the cost model begins with."""
        weights = (1 - self.hardware.overlap) * self.weights_s
        return self.overhead_s + weights + self.sampled_s, self.token_s, self.attended_s

    def decode_prior(self) -> tuple[float, float, float]:
        """(per step, per sequence, per token of KV)."""
        each = (1 - self.hardware.overlap) * (self.token_s + self.sampled_s)
        return self.overhead_s + self.weights_s, max(1e-6, each), self.kv_token_s


def attended(rows: Iterable[Row]) -> float:
    """Sum over the rows' tokens of how many tokens each attends to."""
    return sum(len(row.tokens) * (row.start + len(row.tokens) / 2) for row in rows)


def load_hardware(name: str) -> Hardware:
    """A known name, or a YAML file with the fields of `Hardware`. Raises ConfigError."""
    if name in HARDWARE:
        return HARDWARE[name]
    data = _read(Path(name), f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}")
    allowed = {field.name for field in fields(Hardware)}
    unknown = data.keys() - allowed
    if unknown:
        raise ConfigError(f"{name}: unknown keys {sorted(unknown)}; allowed: {sorted(allowed)}")
    missing = {field.name for field in fields(Hardware) if field.default is MISSING} - data.keys()
    if missing:
        raise ConfigError(f"{name}: missing keys {sorted(missing)}")
    values: dict[str, float] = {}
    for key, value in data.items():
        try:
            values[key] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {key} is {value!r}, not a number") from error
        if values[key] <= 0 and key != "overlap":
            raise ConfigError(f"{name}: {key} is {value!r}; must be positive")
    if not 0 <= values.get("overlap", 1.0) <= 1:
        raise ConfigError(f"{name}: overlap is {values['overlap']:g}; from 0 to 1")
    return Hardware(**values)


def load_model(name: str) -> ModelShape:
    """A known name, or a Hugging Face config.json of a Llama-like model. Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    data = _read(Path(name), f"unknown model {name!r}; known: {', '.join(MODELS)}")
    try:
        heads = int(data["num_attention_heads"])
        hidden = int(data["hidden_size"])
        return ModelShape(
            layers=int(data["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            intermediate=int(data["intermediate_size"]),
            vocab=int(data["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: not the config of a Llama-like model: {error}") from error


def _read(path: Path, unknown: str) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(unknown)
    text = path.read_text()
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values")
    return data
