"""Shares of what the device can do: its copy bandwidth and its bfloat16 matrix rate, both measured
here, not taken from a datasheet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pd_cluster.bench.gpu_check.machine import DEVICE, ON_GPU, gpu_kernels, seconds
from pd_cluster.bench.gpu_check.random_model import SEVEN_B, SMALL, RandomWeights, prompt
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.bench.gpu_check.steps import heads_of, planned_by
from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decode_graphs import DecodeGraphs
from pd_cluster.model.decoder import Decoder
from pd_kernels import page_gather, page_scatter, paged_attention
from pd_kernels.registry import BackendUnavailable

MODEL = SEVEN_B if ON_GPU else SMALL
BATCH, CONTEXT = (32, 2048) if ON_GPU else (2, 16)
PROMPT = 8192 if ON_GPU else 8
COPIED_BYTES = (2 << 30) if ON_GPU else (1 << 20)
MATRIX = 8192 if ON_GPU else 128
# Of keys and values moved by gather and scatter.
GATHERED_BYTES = (1 << 30) if ON_GPU else (1 << 12)
DTYPE = torch.bfloat16
# Name, value, and what it is of.
Measured = Callable[[str, float, str], None]


def run(report: Report) -> None:
    if not ON_GPU:
        report(Result("measures", "skipped", detail="no GPU: the figures below mean nothing"))

    def measured(name: str, value: float, unit: str) -> None:
        report(Result(name, "measured", value, unit))

    torch.manual_seed(0)
    copy, matrix = _copy_rate(), _matrix_rate()
    measured("copy_gbps", copy / 1e9, "GB/s, read and written, of a plain copy")
    measured("matrix_tflops", matrix / 1e12, "TFLOP/s of a square bfloat16 product")
    with gpu_kernels():
        for page_size in (1, 16):
            _gather(measured, page_size, copy)
        for page_size in (1, 16):
            _attention(measured, page_size, copy)
        _steps(measured, copy, matrix)


def _copy_rate() -> float:
    source = torch.randn(COPIED_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source))


def _matrix_rate() -> float:
    left, right = (torch.randn(MATRIX, MATRIX, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return 2 * MATRIX**3 / seconds(lambda: left @ right)


def _gather(measured: Measured, page_size: int, copy: float) -> None:
    pool = _pool(page_size, 2 * GATHERED_BYTES // _token_bytes())
    chosen = torch.randperm(pool.num_pages, device=DEVICE)[: pool.num_pages // 2].int()
    pages = pool.view(0, pool.num_pages)
    packed = page_gather(pages, chosen)
    for name, call in (
        ("gather", lambda: page_gather(pages, chosen)),
        ("scatter", lambda: page_scatter(pages, chosen, packed)),
    ):
        rate = 2 * packed.nbytes / seconds(call)
        measured(f"{name}.ps{page_size}_gbps", rate / 1e9, "GB/s, random pages, page-first")
        measured(f"{name}.ps{page_size}_share", rate / copy, "of the copy's; aim 0.8")


def _attention(measured: Measured, page_size: int, copy: float) -> None:
    """By the backend that a model would use, and by each alone."""
    pool = _pool(page_size, BATCH * CONTEXT, layers=2)
    each = CONTEXT // page_size
    order = np.random.default_rng(0).permutation(pool.num_pages)
    chunks = [
        Chunk(np.zeros(1, np.int64), each * page_size - 1, order[row * each : (row + 1) * each])
        for row in range(BATCH)
    ]
    batch = build_batch(chunks, [], page_size).to(DEVICE)
    q = torch.randn(BATCH, MODEL.num_heads, MODEL.head_dim, device=DEVICE).to(DTYPE)
    pool.buffer.normal_()
    k, v = pool.k(1), pool.v(1)
    moved = BATCH * each * page_size * _token_bytes() / MODEL.num_layers
    heads = heads_of(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim, DTYPE)
    for backend in ("", "triton", "flashinfer"):
        try:
            attention = planned_by(backend, heads) if backend else paged_attention(heads)
        except BackendUnavailable:
            continue  # the part before has told why
        planned = attention.step(batch, batch.host, k)
        took = seconds(lambda planned=planned: planned.attend(q, k, v))  # type: ignore[misc]
        name = ".".join(["decode_attention", *filter(None, [backend]), f"ps{page_size}"])
        measured(f"{name}_us", took * 1e6, f"batch {BATCH}, {CONTEXT} tokens")
        measured(f"{name}_share", moved / took / copy, "of copy bandwidth")


def _steps(measured: Measured, copy: float, matrix: float) -> None:
    weights = RandomWeights(MODEL, DTYPE, DEVICE, on_device=True)
    decoder = Decoder(MODEL, weights)
    pool = _pool(1, max(BATCH * CONTEXT, PROMPT))
    pool.buffer.normal_(std=0.1)
    capture = None if ON_GPU else lambda step: step
    graphs = DecodeGraphs(decoder, pool, [BATCH], BATCH * CONTEXT, DEVICE, capture)
    order = np.random.default_rng(0).permutation(pool.num_pages)
    chunks = [
        Chunk(np.zeros(1, np.int64), CONTEXT - 1, order[row * CONTEXT : (row + 1) * CONTEXT])
        for row in range(BATCH)
    ]
    batch = build_batch(chunks, [], 1)
    step = seconds(lambda: graphs.run(batch), flush=False)
    layers = (weights.layer(index) for index in range(MODEL.num_layers))
    read = sum(
        each.qkv.numel() + each.o.numel() + each.gate_up.numel() + each.down.numel()
        for each in layers
    )
    linear = read + weights.head().numel()
    moved = linear * DTYPE.itemsize + BATCH * CONTEXT * _token_bytes()
    measured("decode_step_ms", step * 1e3, f"batch {BATCH}, {CONTEXT} tokens, by CUDA graph")
    measured("decode_step_gbps", moved / step / 1e9, "GB/s of weights and KV")
    measured("decode_step_share", moved / step / copy, "of copy bandwidth; aim 0.7")
    prefill = build_batch([], [Chunk(prompt(MODEL, PROMPT), 0, order[:PROMPT])], 1).to(DEVICE)
    took = seconds(lambda: decoder.forward(prefill, pool), rounds=3, flush=False)
    # Causal: a query sees half of the keys on average, for scores and for values.
    attention = 2 * PROMPT**2 * MODEL.num_heads * MODEL.head_dim * MODEL.num_layers
    operations = 2 * read * PROMPT + attention
    measured("prefill_s", took, f"{PROMPT} tokens")
    measured("prefill_tflops", operations / took / 1e12, "TFLOP/s")
    measured("prefill_share", operations / took / matrix, "of the matrix rate; aim 0.5")


def _pool(page_size: int, tokens: int, layers: int | None = None) -> Layout:
    return make_layout(
        "page_first",
        -(-tokens // page_size),
        layers or MODEL.num_layers,
        page_size,
        MODEL.num_kv_heads,
        MODEL.head_dim,
        DTYPE,
        DEVICE,
    )


def _token_bytes() -> int:
    return MODEL.kv_elements_per_token * DTYPE.itemsize
