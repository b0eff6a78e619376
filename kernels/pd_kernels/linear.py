"""Linear layers whose weight is packed once for the processor at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


class PackedLinear:
    """`x @ weight.T + bias` for a weight that does not change.

    `weight` is [out, in], float32 or bfloat16; calling it takes x [N, in] of that dtype to a new
    [N, out]. In bfloat16 on a CPU that oneDNN has fast bfloat16 products for, the weight is packed
    at construction (`F.linear` packs it anew at every call) and the given one is not kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _packs(weight)
        self._weight = weight
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        if x.shape[0] == 0:  # the packed product refuses an empty batch
            return x.new_empty(0, self.out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


def _packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
