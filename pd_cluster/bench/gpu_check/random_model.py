"""A decoder with random weights, made where it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pd_cluster.bench.gpu_check.machine import ON_GPU
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.rope_scaling import Rope
from pd_cluster.model.weights import LayerWeights

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64 if ON_GPU else 16,  # which all backends take, or which is quick
    intermediate_size=128,
    vocab_size=97,
    max_positions=256,
    rope=Rope(1e4),
    rms_norm_eps=1e-5,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
)
# Mistral 7B's shape.
SEVEN_B = replace(
    SMALL,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=32000,
    max_positions=32768,
)


class RandomWeights:
    """Weights that keep the activations' size; on the CPU and a GPU the same for small models.

    Large ones (`on_device`) are drawn by the device, which is quicker.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_device: bool = False,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._generator = torch.Generator(device if on_device else "cpu").manual_seed(0)
        # Read in whatever order, the tensors are those of one seed.
        self._embedding = self._matrix(config.vocab_size, config.hidden_size, scale=1.0)
        self._layers = [self._layer() for _ in range(config.num_layers)]
        self._head = self._matrix(config.vocab_size, config.hidden_size, scale=0.3)

    def embedding(self) -> Tensor:
        return self._embedding

    def layer(self, index: int) -> LayerWeights:
        return self._layers[index]

    def norm(self) -> Tensor:
        return self._ones()

    def head(self) -> Tensor:
        return self._head

    def _layer(self) -> LayerWeights:
        config = self.config
        heads = config.num_heads * config.head_dim
        fused = heads + 2 * config.num_kv_heads * config.head_dim
        return LayerWeights(
            input_norm=self._ones(),
            qkv=self._matrix(fused, config.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=self._matrix(config.hidden_size, heads),
            o_bias=None,
            post_attention_norm=self._ones(),
            gate_up=self._matrix(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=None,
            down=self._matrix(config.hidden_size, config.intermediate_size),
            down_bias=None,
        )

    def _ones(self) -> Tensor:
        return torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _matrix(self, rows: int, columns: int, scale: float | None = None) -> Tensor:
        values = torch.empty(rows, columns, dtype=torch.float32, device=self._generator.device)
        values.normal_(generator=self._generator)
        values *= columns**-0.5 if scale is None else scale
        return values.to(self.dtype).to(self.device)


def prompt(
    config: ModelConfig, length: int, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length)
