"""Whole steps' attention, planned once for all layers, by each backend against the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pd_cluster.bench.gpu_check.machine import DEVICE, ON_GPU
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.model.batch import Chunk, ForwardBatch, build_batch
from pd_cluster.model.decode_graphs import CudaCapture, filled_up
from pd_kernels import AttentionHeads, PagedAttention, registry
from pd_kernels.flashinfer_attention import FlashinferAttention
from pd_kernels.page_write import page_write_reference
from pd_kernels.paged_attention import PAGED_ATTENTION
from pd_kernels.prefill_attention import prefill_attention_reference
from pd_kernels.registry import BackendUnavailable

HEADS, KV_HEADS, DIM = (32, 8, 128) if ON_GPU else (4, 2, 16)
# Contexts of decode rows, and of prefill chunks (cached, new).
DECODES = [1, 16, 700, 2049, 33] if ON_GPU else [1, 9]
PREFILLS = [(0, 150), (333, 700), (2040, 17)] if ON_GPU else [(0, 5), (7, 4)]
LAYERS, LAYER = 2, 1
# Relative to the result's norm: the sums' order in float32, a few roundings in bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def run(report: Report) -> None:
    # Triton first: flashinfer compiles its kernels when they are first used.
    for backend in ("triton", "flashinfer"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"kernels.step.{backend}"
            suffix = str(dtype).removeprefix("torch.")
            try:
                attention = planned_by(backend, heads_of(HEADS, KV_HEADS, DIM, dtype))
            except BackendUnavailable as error:
                report(Result(f"{name}.{suffix}", "skipped", detail=str(error)))
                continue
            with registry.preferring(DEVICE.type, "triton"):
                for case in _cases(dtype):
                    _check(report, f"{name}.{case.name}.{suffix}", attention, case, dtype)


def heads_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> AttentionHeads:
    return AttentionHeads(heads, kv_heads, dim, dim**-0.5, dtype, DEVICE)


def planned_by(backend: str, heads: AttentionHeads) -> PagedAttention:
    """Raises `BackendUnavailable`, also where the backend leaves these heads to another."""
    attention = PAGED_ATTENTION.load(backend)(heads)
    if (backend == "flashinfer") != isinstance(attention, FlashinferAttention):
        raise BackendUnavailable(f"{backend} takes no {heads.dtype} heads of {heads.head_dim}")
    return attention


@dataclass(frozen=True)
class _Case:
    """A step over a pool of random keys and values; with `captured`, replayed after others."""

    name: str
    pool: Layout
    batches: list[ForwardBatch]
    captured: bool = False


def _cases(dtype: torch.dtype) -> Iterator[_Case]:
    lengths = [*DECODES, *(cached + new for cached, new in PREFILLS)]
    for layout in ("page_first", "layer_first"):
        for page_size in (1, 16) if ON_GPU else (1,) if layout == "page_first" else (4,):
            pages = sum(-(-length // page_size) for length in lengths) + 5
            pool = make_layout(layout, pages, LAYERS, page_size, KV_HEADS, DIM, dtype, DEVICE)
            pool.buffer.copy_(torch.randn(pool.buffer.shape, device=DEVICE))
            name = f"{layout}.ps{page_size}"
            decodes, prefills = _chunks(pool, DECODES), _chunks(pool, PREFILLS)
            yield _Case(f"{name}.decode", pool, [build_batch(decodes, [], page_size)])
            yield _Case(f"{name}.prefill", pool, [build_batch([], prefills, page_size)])
            yield _Case(f"{name}.mixed", pool, [build_batch(decodes, prefills, page_size)])
            # Of one size, with one row more and less of them filling.
            replays = [decodes, list(reversed(decodes))[:-1], decodes[1:]]
            batches = [build_batch(each, [], page_size) for each in replays]
            yield _Case(f"{name}.captured", pool, batches, captured=True)


def _chunks(pool: Layout, lengths: list[int] | list[tuple[int, int]]) -> list[Chunk]:
    order = np.random.default_rng(3).permutation(pool.num_pages)
    chunks, taken = [], 0
    for length in lengths:
        cached, new = length if isinstance(length, tuple) else (length - 1, 1)
        pages = -(-(cached + new) // pool.page_size)
        chunks.append(Chunk(np.zeros(new, np.int64), cached, order[taken : taken + pages]))
        taken += pages
    return chunks


def _check(
    report: Report, name: str, attention: PagedAttention, case: _Case, dtype: torch.dtype
) -> None:
    try:
        worst = max(_captured(attention, case) if case.captured else [_step(attention, case)])
    except Exception as error:  # a kernel that does not compile raises what it likes
        detail = f"{type(error).__name__}: {error}"[:300]
        report(Result(name, "FAILED", detail=detail))
        return
    good = worst <= TOLERANCE[dtype]
    report(Result(name, "ok" if good else "FAILED", detail=f"off by {worst:.1e}"))


def _step(attention: PagedAttention, case: _Case) -> float:
    [batch] = case.batches
    moved, pool = batch.to(DEVICE), case.pool
    q, k, v = _heads(len(batch.slots), pool.dtype)
    expected, written = _expected(moved, pool, q, k, v)
    planned = attention.step(moved, moved.host, pool.k(LAYER))
    planned.write(k, v, pool.k(LAYER), pool.v(LAYER))
    out = planned.attend(q, pool.k(LAYER), pool.v(LAYER))
    return max(distance(out, expected), distance(pool.buffer, written))


def _captured(attention: PagedAttention, case: _Case) -> Iterator[float]:
    """Every batch by one capture, as decode steps are run."""
    pool, size = case.pool, case.batches[0].num_decode
    full = [filled_up(batch, size) for batch in case.batches]
    longest = max(len(batch.kv_indices) for batch in full)
    indices = torch.zeros(longest, dtype=torch.int32, device=DEVICE)
    memory = replace(full[0].to(DEVICE), kv_indices=indices)
    q, k, v = _heads(size, pool.dtype)
    planned = attention.captured(memory, pool.k(LAYER))
    outputs: list[Tensor] = []

    def step() -> None:
        planned.write(k, v, pool.k(LAYER), pool.v(LAYER))
        outputs.append(planned.attend(q, pool.k(LAYER), pool.v(LAYER)))

    capture: Callable[[Callable[[], None]], Callable[[], None]]
    capture = CudaCapture() if ON_GPU else lambda step: step
    replay: Callable[[], None] | None = None
    for batch, wanted in zip(full, case.batches, strict=True):
        for at, values in batch.to(DEVICE).tensors().items():
            memory.tensors()[at][: len(values)].copy_(values)
        rows = wanted.num_decode
        expected, written = _expected(wanted.to(DEVICE), pool, q[:rows], k[:rows], v[:rows])
        planned.plan(batch)
        replay = replay or capture(step)
        replay()
        yield distance(outputs[-1][:rows], expected)
        yield distance(pool.buffer, written)


def _heads(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as they lie in a fused product."""
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device=DEVICE).to(dtype)
    return torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)


def _expected(
    batch: ForwardBatch, pool: Layout, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention, and the pool's memory afterwards."""
    memory = pool.buffer.clone()
    k_pages, v_pages = (
        memory.as_strided(each.shape, each.stride(), each.storage_offset())
        for each in (pool.k(LAYER), pool.v(LAYER))
    )
    page_write_reference(k, v, k_pages, v_pages, batch.slots)
    table = (batch.q_indptr, batch.kv_indptr, batch.kv_indices, batch.ctx_lens)
    return prefill_attention_reference(q, k_pages, v_pages, *table, DIM**-0.5), memory


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative to the expected norm; what is not a number anywhere is infinitely far."""
    difference = (actual.double() - expected.double()).norm()
    distance = float(difference / expected.double().norm().clamp_min(1e-30))
    return distance if distance == distance else float("inf")
