"""What config.json may say, and which file or field an error names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pd_cluster.errors import ModelError
from pd_cluster.model.config import ModelConfig, load_config
from pd_cluster.model.frequencies import scaled_frequencies
from pd_cluster.model.rope_scaling import Rope, parse_rope

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


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
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
        rope=Rope(500000.0),
        rms_norm_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
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
    assert load(tmp_path, rope_parameters=rope).rope == Rope(7.0)


def test_rope_scaling_of_older_configs(tmp_path: Path) -> None:
    linear = {"type": "linear", "factor": 2.0}
    assert load(tmp_path, rope_scaling=linear).rope == Rope(500000.0, "linear", 2.0)
    llama3 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    rope = load(tmp_path, rope_scaling=llama3).rope
    assert rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192.0)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 5e5), (96, 1e6)])
def test_scaled_frequencies_are_those_of_transformers(
    kind: str, head_dim: int, theta: float
) -> None:
    settings = {**LLAMA3, "rope_type": kind, "rope_theta": theta}
    upstream = LlamaConfig(head_dim=head_dim, rope_parameters=settings)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](upstream)
    assert attention_factor == 1.0
    ours = scaled_frequencies(parse_rope({"rope_parameters": settings}, ""), head_dim)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=0)


FEATURES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("LlamaForCausalLM", {"attention_bias": True}, {"qkv_bias", "o_bias"}),
    ("LlamaForCausalLM", {"mlp_bias": True}, {"mlp_bias"}),
    # transformers' classes of the others know no such flags.
    ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, set()),
    ("Qwen2ForCausalLM", {"mlp_bias": True}, {"qkv_bias"}),
    ("Qwen3ForCausalLM", {"head_dim": 16}, {"qk_norm"}),
    (
        "Qwen3ForCausalLM",
        {"head_dim": 16, "attention_bias": True},
        {"qk_norm", "qkv_bias", "o_bias"},
    ),
]


@pytest.mark.parametrize(("architecture", "changes", "features"), FEATURES)
def test_features_of_the_families(
    tmp_path: Path, architecture: str, changes: dict[str, Any], features: set[str]
) -> None:
    config = load(tmp_path, architectures=[architecture], sliding_window=None, **changes)
    known = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    assert {name for name in known if getattr(config, name)} == features


@pytest.mark.parametrize(
    ("architecture", "changes", "positions"),
    [
        ("MistralForCausalLM", {"sliding_window": 50}, 50),
        ("MistralForCausalLM", {"sliding_window": 500}, 128),
        ("MistralForCausalLM", {"sliding_window": None}, 128),
        # A window that Mistral's config leaves out is transformers' default of 4096.
        ("MistralForCausalLM", {"max_position_embeddings": 9999}, 4096),
        ("LlamaForCausalLM", {"sliding_window": 50}, 128),
        ("Qwen2ForCausalLM", {"sliding_window": 50}, 128),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": True}, 128),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 1},
            50,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "head_dim": 16,
                "sliding_window": 50,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            50,
        ),
        (
            "Qwen2ForCausalLM",
            {
                "sliding_window": 50,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            128,
        ),
    ],
)
def test_positions_end_at_a_sliding_window(
    tmp_path: Path, architecture: str, changes: dict[str, Any], positions: int
) -> None:
    assert load(tmp_path, architectures=[architecture], **changes).max_positions == positions


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
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope scaling 'dynamic' .* use default, lin"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor must be a number .* None"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, found None"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor must be .* found True"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            r"low_freq_factor \(4.0\) must be below high_freq_factor \(4.0\)",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": None},
            "num_key_value_heads must be a whole number",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim must be a whole number"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"},
            "sliding_window must be a whole number above 0, found 'wide'",
        ),
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


def test_a_gateway_reads_a_config_without_torch() -> None:
    """It would take seconds and some hundred megabytes of every gateway."""
    script = (
        "import sys; import pd_cluster.model.config, pd_cluster.model.generation, "
        "pd_cluster.model.tokenizer; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
