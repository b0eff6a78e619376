"""Times the ops at SmolLM2-135M's shapes, the reference and the backend in use in the same run.

`python -m pd_kernels.bench` prints the figures; they are of one machine, so compare them only with
others of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pd_kernels.decode_attention import DECODE_ATTENTION
from pd_kernels.linear import PackedLinear, linear_reference
from pd_kernels.page_write import PAGE_WRITE
from pd_kernels.prefill_attention import PREFILL_ATTENTION
from pd_kernels.rms_norm import FUSED_ADD_RMS_NORM, RMS_NORM
from pd_kernels.rope import ROPE, rope_cos_sin, rope_frequencies
from pd_kernels.silu_and_mul import SILU_AND_MUL

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 576, 9, 3, 64, 1536
LAYERS = 30  # of the model; also how often each op runs in a step
_DTYPE = torch.bfloat16
_POOL_LAYERS = 4  # enough that the layers' distance is real, few enough for a small machine
_SCALE = HEAD_DIM**-0.5


def run(*, seconds_each: float = 0.05) -> dict[str, float]:
    """Microseconds per call by name: `op.case.ours`, `op.case.torch`.

    `step.bN.*` is what all ops but the linear layers cost in one decode step of N sequences with a
    context of 512, over all layers; `decode_attention.*` and `prefill_attention.*` tell the pool's
    layout and page size. `seconds_each` is how long each figure is measured.
    """
    figures: dict[str, float] = {}
    for name, call in _cases():
        figures[name] = _microseconds(call, seconds_each)
    for batch in (1, 8, 32):
        attention = f"decode_attention.page_first.ps1.b{batch}x512"
        for side in ("ours", "torch"):
            small = (f"{op}.n{batch}" for op in ("rope", "silu_and_mul", "page_write"))
            norms = 2 * figures[f"fused_add_rms_norm.n{batch}.{side}"]
            layer = norms + sum(figures[f"{op}.{side}"] for op in (*small, attention))
            figures[f"step.b{batch}.{side}"] = LAYERS * layer
    return figures


def _cases() -> Iterator[tuple[str, Callable[[], object]]]:
    torch.manual_seed(0)
    for n in (1, 8, 32, 512):
        yield from _small_ops(n)
    for layout in ("page_first", "layer_first"):
        for page_size in (1, 16):
            pages = Pages(layout, page_size, num_tokens=32 * 512)
            for batch, context in ((1, 512), (8, 512), (32, 512), (1, 4096)):
                where = f"{layout}.ps{page_size}"
                yield from pages.decode(
                    f"decode_attention.{where}.b{batch}x{context}", batch, context
                )
            for new, context in ((512, 512), (512, 4096)):
                yield from pages.prefill(
                    f"prefill_attention.{where}.{new}of{context}", new, context
                )


def _small_ops(n: int) -> Iterator[tuple[str, Callable[[], object]]]:
    x, residual = (torch.randn(n, HIDDEN, dtype=_DTYPE) for _ in range(2))
    weight = torch.ones(HIDDEN, dtype=_DTYPE)
    heads = torch.randn(n, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=_DTYPE)
    q, k, v = heads[:, :HEADS], heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]
    table, positions = (
        rope_cos_sin(rope_frequencies(HEAD_DIM, 1e5), 8192),
        torch.randint(8192, (n,)),
    )
    gates = torch.randn(n, 2 * INTERMEDIATE, dtype=_DTYPE)
    pool = torch.zeros(4096, _POOL_LAYERS, 2, 1, KV_HEADS, HEAD_DIM, dtype=_DTYPE)
    slots = torch.randperm(4096)[:n]
    matrix = torch.randn(2 * INTERMEDIATE, HIDDEN, dtype=_DTYPE)
    linear = PackedLinear(matrix)
    yield f"linear.n{n}.ours", lambda: linear(x)
    yield f"linear.n{n}.torch", lambda: linear_reference(x, matrix)
    for op, arguments in (
        (RMS_NORM, (x, weight, 1e-5)),
        (FUSED_ADD_RMS_NORM, (x, residual, weight, 1e-5)),
        (ROPE, (q, k, positions, table)),
        (SILU_AND_MUL, (gates,)),
        (PAGE_WRITE, (k, v, pool[:, 1, 0], pool[:, 1, 1], slots)),
    ):
        yield from _both(f"{op.name}.n{n}", op, *arguments)


class Pages:
    """A pool of random keys and values in either layout, its pages handed out at random."""

    def __init__(self, layout: str, page_size: int, num_tokens: int) -> None:
        num_pages = num_tokens // page_size
        page = (page_size, KV_HEADS, HEAD_DIM)
        if layout == "page_first":
            pool = torch.randn(num_pages, _POOL_LAYERS, 2, *page, dtype=_DTYPE)
            self.k, self.v = pool[:, 1, 0], pool[:, 1, 1]
        else:
            pool = torch.randn(_POOL_LAYERS, 2, num_pages, *page, dtype=_DTYPE)
            self.k, self.v = pool[1, 0], pool[1, 1]
        self.page_size = page_size
        self.order = torch.randperm(num_pages).to(torch.int32)

    def table(self, batch: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        each = context // self.page_size
        indptr = torch.arange(batch + 1, dtype=torch.int32) * each
        return indptr, self.order[: batch * each], torch.full((batch,), context, dtype=torch.int32)

    def decode(
        self, name: str, batch: int, context: int
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        q = torch.randn(batch, HEADS, HEAD_DIM, dtype=_DTYPE)
        table = self.table(batch, context)
        yield from _both(name, DECODE_ATTENTION, q, self.k, self.v, *table, _SCALE)

    def prefill(
        self, name: str, new: int, context: int
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        q = torch.randn(new, HEADS, HEAD_DIM, dtype=_DTYPE)
        bounds = torch.tensor([0, new], dtype=torch.int32)
        table = self.table(1, context)
        yield from _both(name, PREFILL_ATTENTION, q, self.k, self.v, bounds, *table, _SCALE)


def _both(name: str, op: Any, *arguments: object) -> Iterator[tuple[str, Callable[[], object]]]:
    backend = op.on("cpu")
    yield f"{name}.ours", lambda: backend(*arguments)
    yield f"{name}.torch", lambda: op.reference(*arguments)


def _microseconds(call: Callable[[], object], seconds: float) -> float:
    """The fastest of many short rounds: what the machine does when nothing else disturbs it."""
    call()
    best, calls = float("inf"), 1
    end = time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        now = time.perf_counter()
        best = min(best, (now - begin) / calls)
        if now >= end:
            return best * 1e6
        calls = max(1, int(seconds / 50 / best))


if __name__ == "__main__":
    for name, microseconds in run().items():
        print(f"{name:60s} {microseconds:12.1f} us")
