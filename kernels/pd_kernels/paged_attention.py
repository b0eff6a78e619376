"""The attention of a model by the best backend of its device."""

from __future__ import annotations

from collections.abc import Callable

from pd_kernels import flashinfer_attention
from pd_kernels.packages import package
from pd_kernels.planned_attention import AttentionByOps, AttentionHeads, PagedAttention
from pd_kernels.registry import Op


def _triton() -> Callable[[AttentionHeads], PagedAttention]:
    package("triton")
    return AttentionByOps


PAGED_ATTENTION: Op[Callable[[AttentionHeads], PagedAttention]] = Op(
    "paged_attention",
    AttentionByOps,
    {"cpu": lambda: AttentionByOps, "triton": _triton, "flashinfer": flashinfer_attention.load},
)


def paged_attention(heads: AttentionHeads) -> PagedAttention:
    """The attention of a model by the best backend of its device; what a backend does not take
    (dtype, head_dim, a pool's strides) is done by the ops."""
    return PAGED_ATTENTION.on(heads.device.type)(heads)
