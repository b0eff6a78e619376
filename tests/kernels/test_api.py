from __future__ import annotations

import torch

import pd_kernels
from pd_kernels import bench


def test_public_names() -> None:
    assert sorted(pd_kernels.__all__) == [
        "AttentionHeads",
        "CapturedAttention",
        "PackedLinear",
        "PageTables",
        "PagedAttention",
        "StepAttention",
        "backend_name",
        "decode_attention",
        "decode_attention_reference",
        "filter_probabilities",
        "filter_probabilities_reference",
        "fused_add_rms_norm",
        "fused_add_rms_norm_reference",
        "linear_reference",
        "page_gather",
        "page_gather_reference",
        "page_scatter",
        "page_scatter_reference",
        "page_write",
        "page_write_reference",
        "paged_attention",
        "prefill_attention",
        "prefill_attention_reference",
        "rms_norm",
        "rms_norm_reference",
        "rope",
        "rope_cos_sin",
        "rope_frequencies",
        "rope_reference",
        "silu_and_mul",
        "silu_and_mul_reference",
        "warm_up",
    ]
    assert all(hasattr(pd_kernels, name) for name in pd_kernels.__all__)


def test_bench_names_its_figures() -> None:
    with torch.random.fork_rng():
        figures = bench.run(seconds_each=0.0)
    for name in (
        "step.b1",
        "step.b32",
        "linear.n8",
        "rms_norm.n1",
        "decode_attention.page_first.ps1.b32x512",
        "decode_attention.layer_first.ps16.b1x4096",
        "prefill_attention.page_first.ps16.512of4096",
    ):
        assert figures[f"{name}.ours"] > 0
        assert figures[f"{name}.torch"] > 0
