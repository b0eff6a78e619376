"""What config.json may say, and which file or field an error names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig, load_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def load(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(folder)


def test_every_field(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=100,
        max_positions=128,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert config.kv_elements_per_token == 2 * 2 * 2 * 16


def test_defaults_of_older_configs(tmp_path: Path) -> None:
    config = load(tmp_path, num_key_value_heads=None, head_dim=32, rope_scaling=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 32)


def test_rope_parameters_of_newer_configs(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 7.0}
    assert load(tmp_path, rope_parameters=rope).rope_theta == 7.0


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 9]}, (5, 9))],
)
def test_generation_config_knows_the_end(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert load(tmp_path, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; use Llama"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias True is not supported; use False"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0, found None"),
        ({"vocab_size": "many"}, "vocab_size must be .* found 'many'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of .* \(3\)"),
        ({"hidden_size": 66}, r"hidden_size \(66\) must be a multiple"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number above 0, found None"),
        ({"rope_theta": "big"}, "rope_theta must be a number above 0, found 'big'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_config(tmp_path)
    for text, message in {"{": "is not JSON", "[1]": "expected an object, found list"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            load_config(tmp_path)
