"""GGUF files of every architecture that can be converted, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen2 import Qwen2Tokenizer

from pd_cluster.errors import ModelError
from pd_cluster.model.config import load_config
from pd_cluster.model.gguf_file import GGUFFile
from pd_cluster.model.rope_scaling import Rope
from pd_cluster.model.store import convert
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.model.weights import Weights
from tests.model.gguf_writer import llama3_divisors, write_gguf
from tests.model.tiny import save_tiny


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def save(folder: Path, family: str = "llama", **settings: Any) -> dict[str, Tensor]:
    """A model's tensors as transformers saves them into `folder`/original."""
    save_tiny(folder / "original", family=family, vocab_size=300, rms_norm_eps=1e-5, **settings)
    return load_file(folder / "original" / "model.safetensors")


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_converts_to_what_it_was_made_from(tmp_path: Path, file: Path, family: str) -> None:
    tensors = save(tmp_path, family, **FAMILIES[family])
    write_gguf(
        file,
        tensors,
        architecture=family,
        edit=lambda writer: family == "qwen3" and writer.add_key_length(32),
    )
    folder = tmp_path / "converted"
    convert(file, folder, progress=False)
    config = load_config(folder)
    assert config == load_config(tmp_path / "original")
    Weights(folder, config, torch.float32)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(converted[name], tensor.bfloat16()), name


def test_its_tokenizer(tmp_path: Path, file: Path) -> None:
    write_gguf(file, save(tmp_path))
    convert(file, tmp_path / "converted", progress=False)
    tokenizer = Tokenizer(tmp_path / "converted")
    assert tokenizer.decode(tokenizer.encode("the <extra39></s>1 he")) == "the <extra39>1 he"
    assert tokenizer.encode("he")[0] == 1
    # A digit is cut off with the space before it left behind; "he" is one of two merges.
    cut = [
        tokenizer.decode([token]) for token in tokenizer.encode(" 12he", add_special_tokens=False)
    ]
    assert cut == [" ", "1", "2", "he"]
    assert tokenizer.apply_chat_template([{"content": "t"}])[-1:] == [2]


@pytest.mark.parametrize(
    "text",
    ["It's 2024,   don't\n\n  I'LL ", "x=1.50;\r\n\treturn ä + e\u0301 #漢字 🎉!!", "  a  \n b\n"],
)
def test_qwen_cuts_text_as_transformers_does(tmp_path: Path, file: Path, text: str) -> None:
    write_gguf(file, save(tmp_path), pre="qwen2")
    ours, upstream = GGUFFile(file).tokenizer(), Qwen2Tokenizer()._tokenizer
    normalized = upstream.normalizer.normalize_str(text)
    assert ours.normalizer.normalize_str(text) == normalized
    pieces = ours.pre_tokenizer.pre_tokenize_str(normalized)
    assert pieces == upstream.pre_tokenizer.pre_tokenize_str(normalized)


def configured(
    folder: Path, edit: Callable[[gguf.GGUFWriter], object], architecture: str = "llama"
) -> dict[str, Any]:
    write_gguf(folder / "tiny.gguf", save(folder), architecture, edit=edit)
    return GGUFFile(folder / "tiny.gguf").config()


def test_llama_3_rope_scaling(tmp_path: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(500000.0)
        writer.add_tensor("rope_freqs.weight", llama3_divisors(500000.0, 16, 32.0))

    configured(tmp_path, scaled)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", progress=False)
    rope = load_config(tmp_path / "converted").rope
    assert rope == Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192.0)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 4, 8, dtype=np.float32))

    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's rope scaling"):
        configured(tmp_path, scaled)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = configured(tmp_path, scaled)["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_a_turn_may_end_otherwise_than_a_text(tmp_path: Path) -> None:
    assert configured(tmp_path, lambda _: None)["eos_token_id"] == 2
    found = configured(tmp_path, lambda writer: writer.add_eot_token_id(0))
    assert found["eos_token_id"] == [2, 0]


def test_positions_end_at_a_sliding_window(tmp_path: Path) -> None:
    found = configured(tmp_path, lambda writer: writer.add_sliding_window(50))
    assert found["max_position_embeddings"] == 50


def test_files_that_cannot_be_used(tmp_path: Path, file: Path) -> None:
    def refuse(message: str) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            convert(file, tmp_path / "converted", progress=False)
        assert "\n" not in str(caught.value)

    tensors = save(tmp_path)
    write_gguf(file, tensors)
    whole = file.read_bytes()
    for size in (0, 10, 2000, len(whole) // 2):
        file.write_bytes(whole[:size])
        refuse("not a readable GGUF file")
    write_gguf(file, tensors, pre="deepseek-llm")
    refuse("pre-tokenizer 'deepseek-llm' is not supported; use gpt-2, smollm, llama-bpe or qwen2")
    write_gguf(file, tensors, architecture="gemma3")
    refuse("architecture gemma3 is not supported; use llama, qwen2, qwen3")
    write_gguf(
        file, tensors, edit=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    refuse("rope scaling 'yarn' is not supported; use none or linear")
    biased = {**tensors, "model.layers.0.self_attn.v_proj.bias": torch.ones(32)}
    write_gguf(file, biased)
    refuse(r"tensor blk\.0\.attn_v\.bias is unknown to llama")
    write_gguf(file, biased, architecture="qwen2")
    refuse(r"tensor model\.layers\.0\.self_attn\.q_proj\.bias \[64\] is missing")
    embedding = tensors.pop("model.embed_tokens.weight")
    write_gguf(file, tensors)
    refuse(r"tensor token_embd\.weight is missing")
    tensors["model.embed_tokens.weight"] = embedding
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    write_gguf(file, tensors)
    refuse(r"tensor model\.layers\.1\.mlp\.up_proj\.weight \[112, 64\] is missing")
