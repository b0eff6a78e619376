"""Reading safetensors, and which tensor or file an error names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model.config import load_config
from pd_cluster.model.weights import Weights
from tests.model.tiny import VOCAB, save_tiny


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, load_config(folder), dtype)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"])
def test_fused_layers(tmp_path: Path, shard_size: str) -> None:
    save_tiny(tmp_path, shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    tensors = {
        name: tensor
        for path in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    weights = load(tmp_path, torch.bfloat16)
    layer = weights.layer(1)
    assert layer.qkv.shape == ((4 + 2 * 2) * 16, 64)
    assert layer.gate_up.shape == (2 * 112, 64)
    expected = torch.cat(
        [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    )
    assert torch.equal(layer.qkv, expected.bfloat16())
    up = tensors["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(layer.gate_up[112:], up.bfloat16())
    assert torch.equal(weights.head(), tensors["lm_head.weight"].bfloat16())
    assert not torch.equal(weights.head(), weights.embedding())


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"])
def test_biases_and_head_norms(tmp_path: Path, shard_size: str) -> None:
    save_tiny(tmp_path, family="qwen3", head_dim=16, attention_bias=True, shard_size=shard_size)
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    layer, prefix = load(tmp_path).layer(2), "model.layers.2.self_attn"
    assert layer.qkv_bias is not None
    assert torch.equal(
        layer.qkv_bias, torch.cat([tensors[f"{prefix}.{part}_proj.bias"] for part in "qkv"])
    )
    for ours, name in {
        layer.o_bias: "o_proj.bias",
        layer.q_norm: "q_norm.weight",
        layer.k_norm: "k_norm.weight",
    }.items():
        assert ours is not None
        assert torch.equal(ours, tensors[f"{prefix}.{name}"])
    assert layer.gate_up_bias is None
    assert layer.down_bias is None


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    weights = load(tmp_path)
    assert torch.equal(weights.head(), weights.embedding())
    # Some checkpoints store the head all the same, and the table of frequencies.
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCAB, 64)}))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert torch.equal(load(tmp_path).head(), weights.embedding())


NORM = "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensor {NORM} [64] is missing"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(63)}),
            f"tensor {NORM} has shape [63]; the config expects [64]",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}),
            f"tensor {NORM} is I8; use F32, F16 or BF16",
        ),
        (
            lambda tensors: tensors.update({"model.extra": torch.ones(2, 3)}),
            "tensor model.extra [2, 3] is unknown to LlamaForCausalLM",
        ),
    ],
)
def test_a_tensor_at_fault(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    save_tiny(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}: {message}")):
        load(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"shard {shard.name} of .*index\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_unreadable_index(tmp_path: Path, text: str) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: not an index of safetensors files"):
        load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match=r"found neither model\.safetensors nor"):
        load(tmp_path)
