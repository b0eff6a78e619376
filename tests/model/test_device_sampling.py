"""Sampling where the logits are draws the tokens that the host's sampling draws."""

from __future__ import annotations

import msgspec
import pytest
import torch

from pd_cluster.model.device_sampling import sample_on_device
from pd_cluster.model.sampling import sample
from pd_cluster.types import SamplingParams

SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 8, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
]


@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_those_of_the_host(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64 * len(SETTINGS), 50, generator=generator) * 2
    if ties:
        logits = logits.round()
    params = [
        msgspec.convert({"max_tokens": 1, "seed": seed, **settings}, SamplingParams, strict=False)
        for seed in range(64)
        for settings in SETTINGS
    ]
    keys = (params, [row % 3 for row in range(len(params))], list(range(len(params))))
    assert sample_on_device(logits, *keys) == sample(logits, *keys)
