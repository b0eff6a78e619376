"""What a model is: the shape and the features of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError
from pd_cluster.model.json_file import read_json
from pd_cluster.model.rope_scaling import Rope, parse_rope

# Llama's decoder and its relatives, which differ in biases, norms and windows.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer; counts are per layer, lengths are in tokens.

    `max_positions` ends at the sliding window where a layer has one: in a context that fits into
    its window, attention is the plain one. `qk_norm` is a norm of every head of q and k.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope: Rope
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token's keys and values of all layers take."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def load_config(folder: Path) -> ModelConfig:
    """The configuration in `folder`'s config.json and, where it has one, generation_config.json.

    The end-of-sequence ids of generation_config.json win, as in transformers' `generate`. Raises
    ModelError naming the file or field, for an architecture or feature that is not supported too.
    """
    data = read_json(folder / "config.json")
    config = parse_config(data, source=str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = _token_ids(read_json(generation), "eos_token_id", str(generation))
        if ids:
            return ModelConfig(**{**vars(config), "eos_token_ids": ids})
    return config


def parse_config(data: Mapping[str, Any], source: str) -> ModelConfig:
    """A ModelConfig of the fields of a Hugging Face config; `source` names it in errors."""
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise ModelError(f"{source}: architecture {architecture} is not supported; use {allowed}")
    _refuse_features(data, source)
    hidden_size = _count(data, "hidden_size", source)
    num_heads = _count(data, "num_attention_heads", source)
    llama, qwen2, qwen3 = (
        architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3")
    )
    num_kv_heads = (
        num_heads
        # Older Llamas; elsewhere transformers' default is another one, so that none is taken here.
        if llama and data.get("num_key_value_heads") is None
        else _count(data, "num_key_value_heads", source)
    )
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{source}: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if qwen3 or data.get("head_dim") is not None:
        head_dim = _count(data, "head_dim", source)
    elif hidden_size % num_heads:
        raise ModelError(
            f"{source}: hidden_size ({hidden_size}) must be a multiple of "
            f"num_attention_heads ({num_heads})"
        )
    else:
        head_dim = hidden_size // num_heads
    bos = _token_ids(data, "bos_token_id", source)
    attention_bias = (llama or qwen3) and bool(data.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=_count(data, "num_hidden_layers", source),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(data, "intermediate_size", source),
        vocab_size=_count(data, "vocab_size", source),
        max_positions=_max_positions(data, architecture, source),
        rope=parse_rope(data, source),
        rms_norm_eps=_number(data, "rms_norm_eps", 1e-6, source),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=llama and bool(data.get("mlp_bias", False)),
        qk_norm=qwen3,
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(data, "eos_token_id", source),
    )


def _refuse_features(data: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for what a config can ask for and this decoder does not compute."""
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(
            f"{source}: quantization_config ({method}) is not supported; use float weights"
        )
    if (act := data.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{source}: hidden_act {act!r} is not supported; use 'silu'")


def _max_positions(data: Mapping[str, Any], architecture: str, source: str) -> int:
    positions = _count(data, "max_position_embeddings", source)
    window = _sliding_window(data, architecture, source)
    return positions if window is None else min(positions, window)


def _sliding_window(data: Mapping[str, Any], architecture: str, source: str) -> int | None:
    """How many tokens, itself included, a token sees in some layer; None: all, in every layer."""
    if architecture == "LlamaForCausalLM" or data.get("sliding_window", 4096) is None:
        return None
    if architecture != "MistralForCausalLM":
        if not data.get("use_sliding_window", False):
            return None
        # Newer configs name each layer's kind, older ones how many have none.
        kinds = data.get("layer_types")
        if kinds is not None and "sliding_attention" not in kinds:
            return None
        if kinds is None and data.get("max_window_layers", 28) >= data["num_hidden_layers"]:
            return None
    return _count({"sliding_window": 4096, **data}, "sliding_window", source)


def _count(data: Mapping[str, Any], key: str, source: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{source}: {key} must be a whole number above 0, found {value!r}")
    return value


def _number(data: Mapping[str, Any], key: str, default: float, source: str) -> float:
    value = data.get(key, default)
    if not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{source}: {key} must be a number above 0, found {value!r}")
    return float(value)


def _token_ids(data: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    value = data.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) for each in ids):
        raise ModelError(f"{source}: {key} must be a token id or a list of them, found {value!r}")
    return tuple(ids)
