"""The frequencies of rotary position embeddings, stretched as a model's config says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pd_cluster.model.rope_scaling import Rope
from pd_kernels import rope_frequencies


def scaled_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head's dimensions, [head_dim / 2] float32."""
    plain = rope_frequencies(head_dim, rope.theta)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Short waves as they are, long ones stretched, between the two a mean of both."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    weight = (rope.original_max_positions / wavelengths - low) / (high - low)
    mean = (1 - weight) * plain / rope.factor + weight * plain
    stretched = torch.where(weight < 0, plain / rope.factor, mean)
    return torch.where(weight > 1, plain, stretched)
