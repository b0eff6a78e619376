"""Kernels of the model's forward pass over paged KV memory.

Every operation is a file here with its plain torch reference and, where it is compiled, a source of
the same name in `csrc` (CPU) and in `triton_kernels` (CUDA). The backend is chosen by device in
`registry`.
"""

from __future__ import annotations

from pd_kernels.backends import backend_name, warm_up
from pd_kernels.decode_attention import decode_attention, decode_attention_reference
from pd_kernels.linear import PackedLinear, linear_reference
from pd_kernels.page_gather import (
    page_gather,
    page_gather_reference,
    page_scatter,
    page_scatter_reference,
)
from pd_kernels.page_write import page_write, page_write_reference
from pd_kernels.paged_attention import paged_attention
from pd_kernels.planned_attention import (
    AttentionHeads,
    CapturedAttention,
    PagedAttention,
    PageTables,
    StepAttention,
)
from pd_kernels.prefill_attention import prefill_attention, prefill_attention_reference
from pd_kernels.probability_filter import filter_probabilities, filter_probabilities_reference
from pd_kernels.rms_norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from pd_kernels.rope import rope, rope_cos_sin, rope_frequencies, rope_reference
from pd_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

__all__ = [
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
