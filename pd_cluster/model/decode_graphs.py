"""Decode steps by replaying CUDA graphs: the host starts one graph instead of hundreds of kernels.

A graph has the batch size and the addresses that it was captured with. So there is one for each of
some sizes, a batch is filled up to the next of them with rows that write nothing, and all inputs
are copied into the same memory every time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pd_cluster.model.batch import ForwardBatch

# Runs a function once and captures it: returns what replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class Forward(Protocol):
    """A decoder over one page pool."""

    def __call__(self, batch: ForwardBatch) -> Tensor: ...


def bucket_sizes(most: int) -> list[int]:
    """The batch sizes to capture for batches of up to `most`: 1, 2, 4, then multiples of 8, from
    128 on of 16, so that no more than an eighth of a large batch is filling."""
    larger = [size for size in range(8, most + 16, 8) if size <= 128 or size % 16 == 0]
    sizes = [1, 2, 4, *larger]
    covering = bisect_left(sizes, most)
    return sizes[: covering + 1]


def filled_up(batch: ForwardBatch, size: int) -> ForwardBatch:
    """The decode batch with rows added up to `size`: they have no context and no slot (-1).

    Every row's logits come, in the rows' order.
    """
    extra = size - batch.num_decode
    assert extra >= 0
    assert batch.num_decode == len(batch.input_ids)

    def longer(values: Tensor, fill: int) -> Tensor:
        return torch.cat([values, values.new_full((extra,), fill)])

    return ForwardBatch(
        input_ids=longer(batch.input_ids, 0),
        positions=longer(batch.positions, 0),
        slots=longer(batch.slots, -1),
        q_indptr=torch.arange(size + 1, dtype=torch.int32),
        kv_indptr=longer(batch.kv_indptr, int(batch.kv_indptr[-1])),
        kv_indices=batch.kv_indices,
        ctx_lens=longer(batch.ctx_lens, 0),
        num_decode=size,
        logits_rows=torch.arange(size),
    )


class DecodeGraphs:
    """The decode steps of `forward`, for batches of up to `sizes[-1]` sequences.

    `most_pages` bounds a batch's page table. Capturing takes `forward` to wait for nothing: see
    `pd_kernels.triton_kernels`. Used by one thread.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        most_pages: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.sizes = sorted(sizes)
        self._forward = forward
        most = self.sizes[-1]

        def zeros(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self._inputs = ForwardBatch(
            input_ids=zeros(most),
            positions=zeros(most),
            slots=zeros(most) - 1,
            q_indptr=torch.arange(most + 1, dtype=torch.int32, device=device),
            kv_indptr=zeros(most + 1, torch.int32),
            kv_indices=zeros(most_pages, torch.int32),
            ctx_lens=zeros(most, torch.int32),
            num_decode=most,
            logits_rows=torch.arange(most, device=device),
        )
        self._device = device
        self._logits: dict[int, Tensor] = {}
        capture = capture or _CudaCapture()
        # The largest first: the others then find all of their memory in the graphs' common pool.
        self._replay = {size: capture(self._step(size)) for size in reversed(self.sizes)}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether it is all decode steps, and not more than were captured."""
        return (
            0 < batch.num_decode <= self.sizes[-1]
            and batch.num_decode == len(batch.input_ids)
            and len(batch.kv_indices) <= len(self._inputs.kv_indices)
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """The logits of `batch`, a batch on the CPU that `fits`: as the decoder's `forward`.

        They are valid until the next run.
        """
        size = self.sizes[bisect_left(self.sizes, batch.num_decode)]
        moved = filled_up(batch, size).to(self._device).tensors()
        for name, memory in self._inputs.tensors().items():
            memory[: len(moved[name])].copy_(moved[name], non_blocking=True)
        self._replay[size]()
        logits = self._logits[size]
        every_row = len(batch.logits_rows) == batch.num_decode
        return logits[: batch.num_decode] if every_row else logits[batch.logits_rows]

    def _step(self, size: int) -> Callable[[], None]:
        inputs = self._inputs
        batch = ForwardBatch(
            input_ids=inputs.input_ids[:size],
            positions=inputs.positions[:size],
            slots=inputs.slots[:size],
            q_indptr=inputs.q_indptr[: size + 1],
            kv_indptr=inputs.kv_indptr[: size + 1],
            kv_indices=inputs.kv_indices,
            ctx_lens=inputs.ctx_lens[:size],
            num_decode=size,
            logits_rows=inputs.logits_rows[:size],
        )

        def step() -> None:
            self._logits[size] = self._forward(batch)

        return step


class _CudaCapture:
    """Captures into graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and libraries initialised before, on a stream that is not captured.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay
