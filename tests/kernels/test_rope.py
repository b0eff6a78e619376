from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pd_kernels import rope, rope_cos_sin, rope_frequencies, rope_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def fused_qkv(tokens: int, hq: int, hk: int, d: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, (hq + 2 * hk) * d, generator=generator).to(dtype)


def split(qkv: Tensor, hq: int, hk: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([hq * d, hk * d, hk * d], dim=-1)
    return q.unflatten(-1, (hq, d)), k.unflatten(-1, (hk, d)), v


def test_reference_is_transformers_llama_rope_bit_for_bit() -> None:
    config = LlamaConfig(
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    positions = torch.tensor([0, 1, 5, 77, 8191])
    q, k, _ = split(fused_qkv(5, 9, 3, 64, torch.float32), 9, 3, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    q, k = q.clone(), k.clone()
    rope_reference(q, k, positions, rope_cos_sin(rope_frequencies(64, 100000.0), 8192))
    assert torch.equal(q, theirs[0][0].transpose(0, 1))
    assert torch.equal(k, theirs[1][0].transpose(0, 1))


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "hq", "hk", "d"),
    [(0, 9, 3, 64), (1, 9, 3, 64), (37, 9, 3, 64), (5, 4, 4, 128), (3, 2, 1, 6), (4, 8, 2, 80)],
)
def test_rope_matches_reference_on_slices_of_fused_qkv(
    tokens: int,
    hq: int,
    hk: int,
    d: int,
    dtype: torch.dtype,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    table = rope_cos_sin(rope_frequencies(d, 10000.0), 500)
    positions = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:tokens]
    qkv = fused_qkv(tokens, hq, hk, d, dtype)
    expected = qkv.clone()
    rope_reference(*split(expected, hq, hk, d)[:2], positions, table)
    q, k, v = split(qkv, hq, hk, d)
    values = v.clone()
    rope(q, k, positions, table)
    assert_close(qkv, expected)
    assert torch.equal(v, values)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="even head_dim, got 63"):
        rope_frequencies(63, 10000.0)
