"""Writing small models as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    architecture: str = "llama",
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> None:
    """The model of `tensors`, of the shape of `save_tiny`'s with 300 words.

    `edit` adds metadata and tensors to it.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(112)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, pre)
    edit(writer)
    for name, tensor in tensors.items():
        stem, kind = name.rsplit(".", 1)
        values, prefix = tensor.numpy(), ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _interleave(values)
        writer.add_tensor(f"{prefix}{_STEMS[stem]}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = ["<|endoftext|>", "<s>", "</s>", "<pad>", *(f"<extra{i}>" for i in range(40))]
    # The alphabet of byte-level tokenizers: printable bytes stand for themselves.
    tokens += [chr(code) for code in range(33, 127)] + ["Ġ", "he", "Ġt"]
    tokens += [f"<{index}>" for index in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 43 + [4] + [1] * (300 - 44))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")


def _interleave(values: Any) -> Any:
    """Rows of each head (16 of them) as llama.cpp wants them: 0, 8, 1, 9, ..."""
    order = [
        head + half + pair
        for head in range(0, len(values), 16)
        for pair in range(8)
        for half in (0, 8)
    ]
    return values[order]


def llama3_divisors(theta: float, head_dim: int, factor: float) -> Any:
    """What the converter stores of Llama 3's rope scaling: plain frequencies over scaled ones."""
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (exponent / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
