"""A model's tensors, from a folder of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class LayerWeights:
    """One layer, with the products that share an input fused; every matrix is [out, in].

    `qkv` is [(num_heads + 2 * num_kv_heads) * head_dim, hidden], `gate_up` [2 * intermediate,
    hidden]; biases are [out], and None where the model has none. `q_norm` and `k_norm` are
    [head_dim].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class ModelWeights(Protocol):
    """The tensors of a model, each read when it is asked for."""

    def embedding(self) -> Tensor: ...

    def layer(self, index: int) -> LayerWeights: ...

    def norm(self) -> Tensor: ...

    def head(self) -> Tensor: ...


class Weights:
    """The tensors of the model in `folder`, checked whole at construction and read when asked for.

    So a caller that packs or moves one layer after the other never holds the model twice. Raises
    ModelError for a missing or unreadable file, and for a tensor that is missing, unknown or of
    another shape than `config` says.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = str(device)
        self._files = {path: _open(path, self._device) for path in _shards(folder)}
        self._path_of = {name: path for path, file in self._files.items() for name in file.keys()}
        self._check(folder)

    def embedding(self) -> Tensor:
        """[vocab, hidden]"""
        return self._read("model.embed_tokens.weight")

    def layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."

        def read(*names: str, suffix: str = "weight") -> Tensor:
            tensors = [self._read(f"{prefix}{name}.{suffix}") for name in names]
            return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

        def bias(present: bool, *names: str) -> Tensor | None:
            return read(*names, suffix="bias") if present else None

        config = self._config
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        return LayerWeights(
            input_norm=read("input_layernorm"),
            qkv=read(*qkv),
            qkv_bias=bias(config.qkv_bias, *qkv),
            q_norm=read("self_attn.q_norm") if config.qk_norm else None,
            k_norm=read("self_attn.k_norm") if config.qk_norm else None,
            o=read("self_attn.o_proj"),
            o_bias=bias(config.o_bias, "self_attn.o_proj"),
            post_attention_norm=read("post_attention_layernorm"),
            gate_up=read(*gate_up),
            gate_up_bias=bias(config.mlp_bias, *gate_up),
            down=read("mlp.down_proj"),
            down_bias=bias(config.mlp_bias, "mlp.down_proj"),
        )

    def norm(self) -> Tensor:
        """The last norm, [hidden]."""
        return self._read("model.norm.weight")

    def head(self) -> Tensor:
        """[vocab, hidden]; the embedding where the two are tied."""
        return self.embedding() if self._config.tie_embeddings else self._read("lm_head.weight")

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._path_of[name]].get_tensor(name)
        return tensor.to(self._dtype)

    def _check(self, folder: Path) -> None:
        headers = {name: self._files[path].get_slice(name) for name, path in self._path_of.items()}
        found = {name: tuple(header.get_shape()) for name, header in headers.items()}
        check_tensors(found, self._config, str(folder))
        for name in tensor_shapes(self._config):
            if (dtype := headers[name].get_dtype()) not in ("F32", "F16", "BF16"):
                raise ModelError(f"{folder}: tensor {name} is {dtype}; use F32, F16 or BF16")


def check_tensors(found: Mapping[str, tuple[int, ...]], config: ModelConfig, source: str) -> None:
    """Raises ModelError for the first tensor of `source` that is missing, unknown or misshapen."""
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{source}: tensor {name} {_text(shape)} is missing")
        if found[name] != shape:
            raise ModelError(
                f"{source}: tensor {name} has shape {_text(found[name])}; the config expects "
                f"{_text(shape)}"
            )
    for name in sorted(found.keys() - expected.keys()):
        if not _is_redundant(name, config):
            raise ModelError(
                f"{source}: tensor {name} {_text(found[name])} is unknown to {config.architecture}"
            )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """What older checkpoints carry though it follows from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_embeddings
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of `config` has, by Hugging Face's name."""
    return dict(_tensor_shapes(config))


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, width in norms.items():
            yield f"{prefix}{name}.weight", (width,)
        for name, (rows, columns, bias) in products.items():
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelError(f"{folder}: found neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from error
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: shard {name} of {_INDEX} is missing")
    return [folder / name for name in sorted(names)]


def _open(path: Path, device: str) -> Any:
    # Imported here: weights from elsewhere need no safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device=device)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
