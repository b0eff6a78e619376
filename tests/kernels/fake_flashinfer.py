"""flashinfer as its documentation says it computes, in plain torch on the CPU.

Only the functions and parameters that are used, by flashinfer's names; what its kernels refuse is
refused. `calls` has what was called, with the arguments, to be compared with the real signatures.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pd_kernels

DECODE = "decode.BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "prefill.BatchPrefillWithPagedKVCacheWrapper"
Pages = tuple[Tensor, Tensor]


class FakeFlashinfer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        recorded = self._recorded
        self.norm = SimpleNamespace(
            rmsnorm=recorded("norm.rmsnorm", _rmsnorm),
            fused_add_rmsnorm=recorded("norm.fused_add_rmsnorm", _fused_add_rmsnorm),
        )
        self.activation = SimpleNamespace(
            silu_and_mul=recorded("activation.silu_and_mul", pd_kernels.silu_and_mul_reference)
        )
        rope = "apply_rope_with_cos_sin_cache_inplace"
        self.rope = SimpleNamespace(**{rope: recorded(f"rope.{rope}", _rope)})
        self.page = SimpleNamespace(
            append_paged_kv_cache=recorded("page.append_paged_kv_cache", _append)
        )
        self.sampling = SimpleNamespace(
            top_k_renorm_probs=recorded("sampling.top_k_renorm_probs", _top_k),
            top_p_renorm_probs=recorded("sampling.top_p_renorm_probs", _top_p),
        )
        self.decode = SimpleNamespace(**{DECODE.split(".")[1]: self._wrapper(DECODE, _Decode)})
        self.prefill = SimpleNamespace(**{PREFILL.split(".")[1]: self._wrapper(PREFILL, _Prefill)})

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return function(*args, **kwargs)

        return call

    def _wrapper(self, name: str, kind: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            # As methods get it: the first argument is the object.
            self.calls.append((f"{name}.__init__", (None, *args), kwargs))
            wrapper = kind(*args, **kwargs)
            for method in ("plan", "run"):
                bound = getattr(wrapper, method)
                setattr(wrapper, method, self._method(f"{name}.{method}", bound))
            return wrapper

        return make

    def _method(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, (None, *args), kwargs))
            return method(*args, **kwargs)

        return call


class _Decode:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.use_tensor_cores, self.fixed = use_tensor_cores, use_cuda_graph
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last = paged_kv_last_page_len_buffer
        self.planned: list[int] | None = None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        if self.fixed:
            assert len(last_page_len) == len(self.last)
            assert len(indices) <= len(self.indices)
            self.indptr.copy_(indptr)
            self.last.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last = indptr, indices, last_page_len
        group = num_qo_heads // num_kv_heads
        if not self.use_tensor_cores and group not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {group}")
        self.heads, self.dtype, self.scale = (num_qo_heads, num_kv_heads), q_data_type, sm_scale
        assert head_dim in (64, 128, 256)
        assert kv_data_type == q_data_type
        self.page_size, self.planned = page_size, indptr.tolist()

    def run(self, q: Tensor, paged_kv_cache: Pages, *, out: Tensor) -> Tensor:
        # How the work was divided must be of the lengths that are in memory.
        assert self.planned == self.indptr.tolist()
        rows = torch.arange(len(q) + 1)
        return _attend(self, q, paged_kv_cache, rows, out, causal=False)


class _Prefill:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert head_dim_qk in (64, 128, 256)
        assert kv_data_type == q_data_type
        self.q_indptr, self.indptr, self.indices = qo_indptr, paged_kv_indptr, paged_kv_indices
        self.last, self.page_size, self.causal = paged_kv_last_page_len, page_size, causal
        self.heads, self.dtype, self.scale = (num_qo_heads, num_kv_heads), q_data_type, sm_scale

    def run(self, q: Tensor, paged_kv_cache: Pages, *, out: Tensor) -> Tensor:
        return _attend(self, q, paged_kv_cache, self.q_indptr, out, causal=self.causal)


def _attend(
    plan: Any, q: Tensor, pages: Pages, q_indptr: Tensor, out: Tensor, *, causal: bool
) -> Tensor:
    k_pages, v_pages = pages
    _check_pages(k_pages, v_pages)
    assert q.dtype == k_pages.dtype == plan.dtype
    assert (q.shape[1], k_pages.shape[2]) == plan.heads
    assert k_pages.shape[1] == plan.page_size
    assert out.is_contiguous()
    assert out.shape == q.shape
    group = q.shape[1] // k_pages.shape[2]
    for b, last in enumerate(plan.last.tolist()):
        own = plan.indices[plan.indptr[b] : plan.indptr[b + 1]].long()
        context = (len(own) - 1) * plan.page_size + last if len(own) else 0
        k, v = (
            each[own].flatten(0, 1)[:context].double().repeat_interleave(group, dim=1)
            for each in pages
        )
        first, end = int(q_indptr[b]), int(q_indptr[b + 1])
        scores = torch.einsum("thd,shd->hts", q[first:end].double(), k) * plan.scale
        if causal:
            visible = torch.ones(end - first, context, dtype=torch.bool)
            scores.masked_fill_(~visible.tril(context - (end - first)), float("-inf"))
        out[first:end] = torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(out.dtype)
    return out


def _append(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Pages,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "NHD"
    for table in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert table.is_contiguous()
        assert table.dtype == torch.int32
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    k_pages, v_pages = paged_kv_cache
    _check_pages(k_pages, v_pages)
    page_size = k_pages.shape[1]
    rows = zip(batch_indices.tolist(), positions.tolist(), strict=True)
    for i, (b, position) in enumerate(rows):
        at = int(kv_indptr[b]) + position // page_size
        assert at < kv_indptr[b + 1]
        page, offset = int(kv_indices[at]), position % page_size
        if at == kv_indptr[b + 1] - 1:
            assert offset < kv_last_page_len[b]
        assert 0 <= page < len(k_pages)
        k_pages[page, offset], v_pages[page, offset] = append_key[i], append_value[i]


def _check_pages(k_pages: Tensor, v_pages: Tensor) -> None:
    if k_pages.stride() != v_pages.stride():
        raise RuntimeError("k/v strides must be identical")
    if k_pages.stride(3) != 1:
        raise RuntimeError("the last dimension must be contiguous")


def _rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    return pd_kernels.rms_norm_reference(input, weight, eps)


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    input.copy_(pd_kernels.fused_add_rms_norm_reference(input, residual, weight, eps))


def _rope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    assert is_neox
    q, k = (each.view(len(each), -1, head_size) for each in (query, key))
    pd_kernels.rope_reference(q, k, positions, cos_sin_cache)


def _top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """All that are equal to the k-th largest stay."""
    assert top_k.dtype == torch.int32
    largest = probs.sort(dim=1, descending=True).values
    kth = largest.gather(1, top_k.long()[:, None] - 1)
    return _renormalised(probs.where(probs >= kth, 0))


def _top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """All that are equal to the last of the nucleus stay; sums are in float32."""
    assert top_p.dtype == probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
    larger = torch.stack([(probs * (probs > each[:, None])).sum(1) for each in probs.T], dim=1)
    return _renormalised(probs.where((larger < top_p[:, None]) | (top_p >= 1)[:, None], 0))


def _renormalised(kept: Tensor) -> Tensor:
    return kept / kept.sum(1, keepdim=True)
