"""Each op, by each of the device's backends, against its plain torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pd_cluster.bench.gpu_check import steps
from pd_cluster.bench.gpu_check.machine import DEVICE, ON_GPU
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.bench.gpu_check.steps import TOLERANCE, distance
from pd_kernels.backends import OPS
from pd_kernels.page_gather import PAGE_GATHER, PAGE_SCATTER
from pd_kernels.probability_filter import FILTER_PROBABILITIES
from pd_kernels.registry import BackendUnavailable
from pd_kernels.rope import rope_cos_sin, rope_frequencies

HEADS, KV_HEADS, DIM, LAYERS = (32, 8, 128, 3) if ON_GPU else (4, 2, 16, 2)
CONTEXTS = [1, 16, 700, 2049, 33] if ON_GPU else [1, 40]
NEW = [1, 16, 150, 700, 1] if ON_GPU else [1, 33]
VOCAB = 128_000 if ON_GPU else 50
TOKENS, WIDTH = (100, 4096) if ON_GPU else (3, 100)
BACKENDS = ("triton", "flashinfer")


@dataclass(frozen=True)
class Case:
    """Arguments of an op; tensors of `changed` are written to and compared beside the result."""

    op: str
    name: str
    arguments: tuple[Any, ...]
    changed: tuple[int, ...] = ()


def run(report: Report) -> None:
    torch.manual_seed(0)
    ops: dict[str, Any] = {op.name: op for op in OPS}
    ops |= {op.name: op for op in (FILTER_PROBABILITIES, PAGE_GATHER, PAGE_SCATTER)}
    for dtype in (torch.float32, torch.bfloat16):
        for case in _cases(dtype):
            for backend in (each for each in BACKENDS if ops[case.op].has(each)):
                report(_check(ops[case.op], backend, case, dtype))
    steps.run(report)


def _check(op: Any, backend: str, case: Case, dtype: torch.dtype) -> Result:
    name = f"kernels.{op.name}.{backend}.{case.name}{str(dtype).removeprefix('torch.')}"
    try:
        kernel = op.load(backend)
    except BackendUnavailable as error:
        return Result(name, "skipped", detail=str(error))
    theirs, ours = _copied(case.arguments), _copied(case.arguments)
    expected = [op.reference(*theirs), *(theirs[at] for at in case.changed)]
    try:
        actual = [kernel(*ours), *(ours[at] for at in case.changed)]
    except Exception as error:  # a kernel that does not compile raises what it likes
        return Result(name, "FAILED", detail=f"{type(error).__name__}: {error}"[:300])
    worst = max(
        distance(mine, right)
        for mine, right in zip(actual, expected, strict=True)
        if right is not None
    )
    good = worst <= TOLERANCE[dtype]
    return Result(name, "ok" if good else "FAILED", detail=f"off by {worst:.1e}")


def _copied(arguments: tuple[Any, ...]) -> list[Any]:
    """Copies that keep strides, and pages that are views of one pool."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            whole = value.new_empty(0).set_(storage).clone()
            copies[storage.data_ptr()] = whole
        whole = copies[storage.data_ptr()]
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    return [copied(value) for value in arguments]


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    x, residual, gates = (_rand(TOKENS, width, dtype=dtype) for width in (WIDTH, WIDTH, 2 * WIDTH))
    weight = _rand(WIDTH, dtype=dtype)
    yield Case("rms_norm", "", (x, weight, 1e-5))
    yield Case("fused_add_rms_norm", "", (x, residual, weight, 1e-5), changed=(1,))
    yield Case("silu_and_mul", "", (gates,))
    table = rope_cos_sin(rope_frequencies(DIM, 1e4), 4096).to(DEVICE)
    heads = _rand(TOKENS, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    positions = torch.randint(4096, (TOKENS,), device=DEVICE)
    yield Case("rope", "", (q, k, positions, table), changed=(0, 1))
    if dtype is torch.float32:
        yield _filter()
    for layout in ("page_first", "layer_first"):
        for page_size in (1, 16) if ON_GPU or layout == "page_first" else (4,):
            yield from _paged(layout, page_size, k, v, dtype)


def _filter() -> Case:
    """Rows with many equal weights among them, some with every filter and some with none."""
    logits = torch.randn(32 if ON_GPU else 2, VOCAB, device=DEVICE) * 3
    logits[::2] = (logits[::2] * 8).round() / 8
    weights = (logits - logits.amax(1, keepdim=True)).exp()

    def column(first: float, other: float, dtype: torch.dtype) -> Tensor:
        values = torch.full((len(weights),), other, dtype=dtype, device=DEVICE)
        values[0] = first
        return values

    min_p, top_k = column(0.0, 1e-3, torch.float32), column(VOCAB, VOCAB // 7, torch.int32)
    return Case(
        "filter_probabilities", "", (weights, min_p, top_k, column(1.0, 0.9, torch.float64))
    )


def _paged(layout: str, page_size: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Iterator[Case]:
    name = f"{layout}.ps{page_size}."
    counts = [-(-context // page_size) for context in CONTEXTS]
    num_pages = sum(counts) + 3
    page = (page_size, KV_HEADS, DIM)
    if layout == "page_first":
        pool = _rand(num_pages, LAYERS, 2, *page, dtype=dtype)
        whole = pool
        k_pages, v_pages = pool[:, 1, 0], pool[:, 1, 1]
    else:
        pool = _rand(LAYERS, 2, num_pages, *page, dtype=dtype)
        whole = pool.permute(2, 0, 1, 3, 4, 5)
        k_pages, v_pages = pool[1, 0], pool[1, 1]
    order = torch.randperm(num_pages, device=DEVICE)
    slots = torch.randperm(num_pages * page_size, device=DEVICE)[: len(k)]
    yield Case(
        "page_write", name, (k[: len(slots)], v[: len(slots)], k_pages, v_pages, slots), (2, 3)
    )
    chosen = order[: num_pages // 2].int()
    yield Case("page_gather", name, (whole, chosen))
    packed = _rand(len(chosen), LAYERS, 2, *page, dtype=dtype)
    yield Case("page_scatter", name, (whole, chosen, packed), (0,))
    table = (_indptr(counts), order[: sum(counts)].int(), _int32(CONTEXTS))
    q = _rand(len(CONTEXTS), HEADS, DIM, dtype=dtype)
    yield Case("decode_attention", name, (q, k_pages, v_pages, *table, DIM**-0.5))
    q = _rand(sum(NEW), HEADS, DIM, dtype=dtype)
    arguments = (q, k_pages, v_pages, _indptr(NEW), *table, DIM**-0.5)
    yield Case("prefill_attention", name, arguments)


def _rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _indptr(counts: list[int]) -> Tensor:
    return torch.cat([_int32([0]), _int32(counts).cumsum(0).int()])
