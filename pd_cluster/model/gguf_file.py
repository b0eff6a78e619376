"""Reading a model out of one GGUF file: its config, its tensors and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from pd_cluster.errors import ModelError

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL_TOKEN, _USER_TOKEN = 3, 4


class GGUFFile:
    """A Llama model in llama.cpp's format. ModelError for what is unreadable or unsupported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        except (ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path}: not a readable GGUF file: {error}") from error
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path}: architecture {architecture} is not supported; use llama")

    def config(self) -> dict[str, Any]:
        """The model's configuration, as the fields of a Hugging Face config.json."""
        scaling = self._field("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ModelError(f"{self.path}: rope scaling {scaling!r} is not supported; use 'none'")
        hidden_size = self._field("llama.embedding_length")
        num_heads = self._field("llama.attention.head_count")
        head_dim = self._field("llama.attention.key_length", hidden_size // num_heads)
        rotated = self._field("llama.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelError(
                f"{self.path}: rope over {rotated} of {head_dim} dimensions is not supported"
            )
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "token_embd.weight" not in tensors:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self._field("llama.block_count"),
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self._field("llama.context_length"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self._field("llama.rope.freq_base", 10000.0),
            },
            "rms_norm_eps": self._rms_norm_eps(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "bfloat16",
        }

    def _rms_norm_eps(self) -> float:
        """Stored as float32, so 1e-5 reads as 9.999999747378752e-06: rounded to 6 digits."""
        return float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}")

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, dequantised, by Hugging Face's name and in its order of dimensions."""
        heads = {
            "attn_q": self._field("llama.attention.head_count"),
            "attn_k": self._field("llama.attention.head_count_kv", None),
        }
        heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
        for tensor in self._reader.tensors:
            name = self._hugging_face_name(tensor.name)
            try:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: tensor {tensor.name}: {error}") from error
            num_heads = heads.get(tensor.name.split(".")[-2])
            if num_heads is not None:
                values = _unpermute(values, num_heads)
            # A copy where nothing was dequantised: the reader's arrays are views of the file.
            yield name, torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)

    def _hugging_face_name(self, name: str) -> str:
        match name.split("."):
            case [stem, "weight"] if stem in _TENSORS:
                return f"{_TENSORS[stem]}.weight"
            case ["blk", index, stem, "weight"] if stem in _LAYER_TENSORS:
                return f"model.layers.{index}.{_LAYER_TENSORS[stem]}.weight"
        raise ModelError(f"{self.path}: tensor {name} is unknown to llama")

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer of the file's vocabulary and merges."""
        kind = self._field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelError(
                f"{self.path}: tokenizer {kind!r} cannot be read from GGUF; use 'gpt2', or a "
                f"folder of safetensors with a tokenizer.json"
            )
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(pair.split(" ", 1)) for pair in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == _CONTROL_TOKEN
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == _USER_TOKEN
            ]
        )
        if self._field("tokenizer.ggml.add_bos_token", False):
            bos = tokens[self._field("tokenizer.ggml.bos_token_id")]
            tokenizer.post_processor = _prepend(bos, vocabulary[bos])
        return tokenizer

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, unk_token and pad_token, those that the file names."""
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        keys = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }
        ids = {name: self._field(f"tokenizer.ggml.{key}", None) for name, key in keys.items()}
        return {name: tokens[index] for name, index in ids.items() if index is not None}

    def chat_template(self) -> str | None:
        template: str | None = self._field("tokenizer.chat_template", None)
        return template

    def _pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """How text is cut before the merges, by llama.cpp's name for it."""
        match self._field("tokenizer.ggml.pre", "default"):
            case "gpt-2":
                return pre_tokenizers.ByteLevel(add_prefix_space=False)
            case "smollm":
                return pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Digits(individual_digits=True),
                        pre_tokenizers.ByteLevel(add_prefix_space=False),
                    ]
                )
            case "llama-bpe":
                pattern = (
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                )
                return pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                )
            case other:
                raise ModelError(
                    f"{self.path}: pre-tokenizer {other!r} is not supported; use gpt-2, smollm or "
                    f"llama-bpe"
                )

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if not default:
            raise ModelError(f"{self.path}: metadata {key} is missing")
        return default[0]


def _prepend(token: str, token_id: int) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )


def _unpermute(values: Any, num_heads: int) -> Any:
    """Undoes llama.cpp's interleaving of the two halves of each head's rows (its form of rope)."""
    rows, columns = values.shape
    halves = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
