"""The forward pass of a decoder of Llama's family over paged KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.config import ModelConfig, load_config
from pd_cluster.model.frequencies import scaled_frequencies
from pd_cluster.model.weights import LayerWeights, ModelWeights, Weights
from pd_kernels import (
    AttentionHeads,
    PackedLinear,
    StepAttention,
    fused_add_rms_norm,
    paged_attention,
    rms_norm,
    rope,
    rope_cos_sin,
    silu_and_mul,
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# More than the tokens that bfloat16 cannot tell from the best one.
_EXACT_LOGITS = 16


class KVPages(Protocol):
    """A page pool, seen as views [num_pages, page_size, num_kv_heads, head_dim] of each layer."""

    def k(self, layer: int) -> Tensor: ...

    def v(self, layer: int) -> Tensor: ...


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear

    @classmethod
    def pack(cls, weights: LayerWeights) -> _Layer:
        return cls(
            input_norm=weights.input_norm,
            qkv=PackedLinear(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            o=PackedLinear(weights.o, weights.o_bias),
            post_attention_norm=weights.post_attention_norm,
            gate_up=PackedLinear(weights.gate_up, weights.gate_up_bias),
            down=PackedLinear(weights.down, weights.down_bias),
        )


class _Head:
    """The last product, with logits in float32.

    In bfloat16 a logit of 16 or more is rounded to eighths, so the best tokens often tie. Those few
    are computed again without that rounding.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._product = PackedLinear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        rounded = self._product(hidden)
        if rounded.dtype == torch.float32:
            return rounded
        best = rounded.topk(min(_EXACT_LOGITS, rounded.shape[1])).indices
        exact = torch.einsum("rh,rkh->rk", hidden.float(), self._weight[best].float())
        return rounded.float().scatter_(1, best, exact)


class Decoder:
    """A model of any of `config.ARCHITECTURES`, ready to run.

    In float32 its greedy tokens are those of transformers' class of that name.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._embedding = weights.embedding()
        self._layers = [_Layer.pack(weights.layer(index)) for index in range(config.num_layers)]
        self._norm = weights.norm()
        self._head = _Head(weights.head())
        table = rope_cos_sin(scaled_frequencies(config.rope, config.head_dim), config.max_positions)
        self._cos_sin = table.to(self._embedding.device)
        self.attention = paged_attention(
            AttentionHeads(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.head_dim**-0.5,
                self._embedding.dtype,
                self._embedding.device,
            )
        )

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
        """The model in `folder` (config.json, safetensors). Raises ModelError."""
        config = load_config(folder)
        return cls(config, Weights(folder, config, dtype, device))

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv: KVPages, attention: StepAttention | None = None
    ) -> Tensor:
        """Writes the new tokens' keys and values to their slots.

        `attention` is the step's where it was planned before, for a capture. Returns the logits of
        `batch.logits_rows`, [len(logits_rows), vocab] float32.
        """
        if attention is None:
            attention = self.attention.step(batch, batch.host, kv.k(0))
        eps = self.config.rms_norm_eps
        residual = self._embedding[batch.input_ids]
        hidden = rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            q, k, v = self._heads(layer, hidden, batch.positions)
            attention.write(k, v, kv.k(index), kv.v(index))
            attended = attention.attend(q, kv.k(index), kv.v(index)).flatten(1)
            last = index + 1 == len(self._layers)
            if last:
                # What follows the last attention is only of use where logits are wanted.
                attended, residual = attended[batch.logits_rows], residual[batch.logits_rows]
            hidden = layer.o(attended)
            hidden = fused_add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            hidden = layer.down(silu_and_mul(layer.gate_up(hidden)))
            norm = self._norm if last else self._layers[index + 1].input_norm
            hidden = fused_add_rms_norm(hidden, residual, norm, eps)
        return self._head(hidden)

    def _heads(
        self, layer: _Layer, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of a layer: [N, heads, head_dim] each."""
        config = self.config
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        q, k, v = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        rope(q, k, positions, self._cos_sin)
        return q, k, v

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Every head of [N, heads, head_dim] normed by itself."""
        rows = heads.reshape(-1, self.config.head_dim)
        return rms_norm(rows, weight, self.config.rms_norm_eps).view(heads.shape)
