"""Reading a model out of one GGUF file: its config, its tensors and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model import gguf_tokenizer
from pd_cluster.model.frequencies import scaled_frequencies
from pd_cluster.model.rope_scaling import Rope
from pd_kernels import rope_frequencies

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# llama.cpp's names of architectures, and transformers' classes of theirs.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A model in llama.cpp's format. ModelError for what is unreadable or unsupported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        except (ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path}: not a readable GGUF file: {error}") from error
        self._architecture: str = self._field("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            allowed = ", ".join(_ARCHITECTURES)
            raise ModelError(
                f"{path}: architecture {self._architecture} is not supported; use {allowed}"
            )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def config(self) -> dict[str, Any]:
        """The model's configuration, as the fields of a Hugging Face config.json."""
        hidden_size = self._setting("embedding_length")
        num_heads = self._setting("attention.head_count")
        head_dim = self._setting("attention.key_length", hidden_size // num_heads)
        rotated = self._setting("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelError(
                f"{self.path}: rope over {rotated} of {head_dim} dimensions is not supported"
            )
        if "token_embd.weight" not in self._tensors:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing")
        context = self._setting("context_length")
        return {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "num_hidden_layers": self._setting("block_count"),
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._setting("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": self._setting("feed_forward_length"),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            # Within its window a model with one is as others are.
            "max_position_embeddings": min(
                context, self._setting("attention.sliding_window", context)
            ),
            "rope_parameters": self._rope(head_dim),
            "rms_norm_eps": self._rms_norm_eps(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._eos_token_ids(),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "bfloat16",
        }

    def _eos_token_ids(self) -> int | list[int] | None:
        """Of a chat model the end of a turn is often another than that of a text."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [self._field(key, None) for key in keys]
        ids = list(dict.fromkeys(index for index in found if index is not None))
        return ids if len(ids) > 1 else ids[0] if ids else None

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = self._setting("rope.freq_base", 10000.0)
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_rope(head_dim, theta)
        match self._setting("rope.scaling.type", "none"):
            case "none":
                return {"rope_type": "default", "rope_theta": theta}
            case "linear":
                factor = self._setting("rope.scaling.factor")
                return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
            case other:
                raise ModelError(
                    f"{self.path}: rope scaling {other!r} is not supported; use none or linear"
                )

    def _llama3_rope(self, head_dim: int, theta: float) -> dict[str, Any]:
        """Llama 3's scaling from the divisors of the frequencies, which alone are stored.

        Meta's models differ in the largest of them only; ModelError where that does not explain
        the others.
        """
        divisors = torch.from_numpy(np.array(self._tensors[_ROPE_FACTORS].data, dtype=np.float32))
        rope = Rope(theta, "llama3", float(divisors.max()))
        stored = rope_frequencies(head_dim, theta) / divisors
        if not torch.allclose(stored, scaled_frequencies(rope, head_dim), rtol=1e-4, atol=0):
            raise ModelError(f"{self.path}: {_ROPE_FACTORS} is not Llama 3's rope scaling")
        return {
            "rope_type": rope.kind,
            "rope_theta": rope.theta,
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }

    def _rms_norm_eps(self) -> float:
        """Stored as float32, so 1e-5 reads as 9.999999747378752e-06: rounded to 6 digits."""
        return float(f"{self._setting('attention.layer_norm_rms_epsilon'):.6g}")

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, dequantised, by Hugging Face's name and in its order of dimensions."""
        num_heads = self._setting("attention.head_count")
        # Only of llama the converter rearranges the rows, for its other form of rope.
        heads = {
            "attn_q": num_heads,
            "attn_k": self._setting("attention.head_count_kv", num_heads),
        }
        permuted = heads if self._architecture == "llama" else {}
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                continue  # in the config
            name = self._hugging_face_name(tensor.name)
            try:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: tensor {tensor.name}: {error}") from error
            stem = tensor.name.split(".")[-2]
            if stem in permuted:
                values = _unpermute(values, permuted[stem])
            # A copy where nothing was dequantised: the reader's arrays are views of the file.
            yield name, torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)

    def _hugging_face_name(self, name: str) -> str:
        match name.split("."):
            case [stem, "weight"] if stem in _TENSORS:
                return f"{_TENSORS[stem]}.weight"
            case ["blk", index, stem, "weight"] if stem in _LAYER_TENSORS:
                return f"model.layers.{index}.{_LAYER_TENSORS[stem]}.weight"
            case ["blk", index, "attn_q" | "attn_k" | "attn_v" as stem, "bias"] if (
                self._architecture == "qwen2"
            ):
                return f"model.layers.{index}.{_LAYER_TENSORS[stem]}.bias"
        raise ModelError(f"{self.path}: tensor {name} is unknown to {self._architecture}")

    def tokenizer(self) -> Tokenizer:
        """Raises ModelError for a kind that is not supported."""
        return gguf_tokenizer.read_tokenizer(self._field, str(self.path))

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, unk_token and pad_token, those that the file names."""
        return gguf_tokenizer.special_tokens(self._field)

    def chat_template(self) -> str | None:
        template: str | None = self._field("tokenizer.chat_template", None)
        return template

    def _setting(self, key: str, *default: Any) -> Any:
        return self._field(f"{self._architecture}.{key}", *default)

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if not default:
            raise ModelError(f"{self.path}: metadata {key} is missing")
        return default[0]


def _unpermute(values: Any, num_heads: int) -> Any:
    """Undoes llama.cpp's interleaving of the two halves of each head's rows (its form of rope)."""
    rows, columns = values.shape
    halves = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
