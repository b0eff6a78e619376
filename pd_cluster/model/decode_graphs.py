"""Decode steps by replaying CUDA graphs: the host starts one graph instead of hundreds of kernels.

A graph has the batch size and the addresses that it was captured with. So there is one for each of
some sizes, a batch is filled up to the next of them with rows that write nothing, and all inputs
are copied into the same memory every time. What the host plans by a batch's lengths, it plans
before each replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.decoder import Decoder, KVPages
from pd_kernels import CapturedAttention

# Runs a function once and captures it: returns what replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def bucket_sizes(most: int) -> list[int]:
    """The batch sizes to capture for batches of up to `most`: 1, 2, 4, then multiples of 8, from
    128 on of 16, so that no more than an eighth of a large batch is filling."""
    larger = [size for size in range(8, most + 16, 8) if size <= 128 or size % 16 == 0]
    sizes = [1, 2, 4, *larger]
    covering = bisect_left(sizes, most)
    return sizes[: covering + 1]


def filling(size: int) -> ForwardBatch:
    """Decode rows that write nothing, for they have no slot (-1), and look at one token of page 0:
    without any, some kernels give what is not a number."""
    rows = torch.arange(size + 1, dtype=torch.int32)
    return ForwardBatch(
        input_ids=torch.zeros(size, dtype=torch.int64),
        positions=torch.zeros(size, dtype=torch.int64),
        slots=torch.full((size,), -1),
        q_indptr=rows,
        kv_indptr=rows,
        kv_indices=torch.zeros(size, dtype=torch.int32),
        ctx_lens=torch.ones(size, dtype=torch.int32),
        num_decode=size,
        logits_rows=torch.arange(size),
    )


def filled_up(batch: ForwardBatch, size: int) -> ForwardBatch:
    """The decode batch with `filling` added up to `size` rows.

    Every row's logits come, in the rows' order.
    """
    assert batch.num_decode == len(batch.input_ids)
    extra = filling(size - batch.num_decode)
    pages = extra.kv_indptr[1:] + batch.kv_indptr[-1:]
    return ForwardBatch(
        input_ids=torch.cat([batch.input_ids, extra.input_ids]),
        positions=torch.cat([batch.positions, extra.positions]),
        slots=torch.cat([batch.slots, extra.slots]),
        q_indptr=torch.arange(size + 1, dtype=torch.int32),
        kv_indptr=torch.cat([batch.kv_indptr, pages]),
        kv_indices=torch.cat([batch.kv_indices, extra.kv_indices]),
        ctx_lens=torch.cat([batch.ctx_lens, extra.ctx_lens]),
        num_decode=size,
        logits_rows=torch.arange(size),
    )


class DecodeGraphs:
    """The decode steps of `decoder` over `kv`, for batches of up to `sizes[-1]` sequences.

    `most_pages` bounds a batch's page table. Capturing takes a forward pass that waits for nothing:
    see `pd_kernels.triton_kernels`. Used by one thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        sizes: Sequence[int],
        most_pages: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.sizes = sorted(sizes)
        self._decoder, self._kv = decoder, kv
        self._most_pages = most_pages
        self._device = device
        most = self.sizes[-1]
        # Behind a batch's own pages come those of the rows that fill it up.
        indices = torch.zeros(most_pages + most, dtype=torch.int32, device=device)
        self._inputs = replace(filling(most).to(device), kv_indices=indices)
        self._logits: dict[int, Tensor] = {}
        self._attention: dict[int, CapturedAttention] = {}
        capture = capture or CudaCapture()
        # The largest first: the others then find all of their memory in the graphs' common pool.
        self._replay = {size: capture(self._step(size)) for size in reversed(self.sizes)}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether it is all decode steps, and not more than were captured."""
        return (
            0 < batch.num_decode <= self.sizes[-1]
            and batch.num_decode == len(batch.input_ids)
            and len(batch.kv_indices) <= self._most_pages
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """The logits of `batch`, a batch on the CPU that `fits`: as the decoder's `forward`.

        They are valid until the next run.
        """
        size = self.sizes[bisect_left(self.sizes, batch.num_decode)]
        full = filled_up(batch, size)
        if len(batch.logits_rows) < batch.num_decode:
            full = replace(full, logits_rows=batch.logits_rows)
        moved = full.to(self._device).tensors()
        wanted = moved.pop("logits_rows")
        inputs = self._inputs.tensors()
        for name, values in moved.items():
            inputs[name][: len(values)].copy_(values, non_blocking=True)
        self._attention[size].plan(full)
        self._replay[size]()
        logits = self._logits[size]
        every_row = len(wanted) == size
        return logits[: batch.num_decode] if every_row else logits[wanted]

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
        attention = self._decoder.attention.captured(batch, self._kv.k(0))
        attention.plan(filling(size))
        self._attention[size] = attention

        def step() -> None:
            self._logits[size] = self._decoder.forward(batch, self._kv, attention)

        return step


class CudaCapture:
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
