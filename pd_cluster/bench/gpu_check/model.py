"""The decoder on the device against the same weights on the CPU: plain, and by captured graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pd_cluster.bench.gpu_check.machine import DEVICE, ON_GPU, gpu_kernels
from pd_cluster.bench.gpu_check.random_model import SMALL, RandomWeights, prompt
from pd_cluster.bench.gpu_check.results import Report, Result
from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decode_graphs import DecodeGraphs
from pd_cluster.model.decoder import Decoder

LENGTHS = [30, 17, 5]  # of prompts
STEPS = 6 if ON_GPU else 1
NUM_PAGES = 256
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
CPU = torch.device("cpu")


class Runner:
    """Sequences of one decoder over a pool; logits come back to the CPU in float32."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, page_size: int, layout: str, graphs: bool
    ) -> None:
        self.decoder = Decoder(SMALL, RandomWeights(SMALL, dtype, device))
        self.device, self.page_size = device, page_size
        self.kv: Layout = make_layout(
            layout,
            NUM_PAGES // page_size,
            SMALL.num_layers,
            page_size,
            SMALL.num_kv_heads,
            SMALL.head_dim,
            dtype,
            device,
        )
        self._graphs: DecodeGraphs | None = None
        if graphs:
            # Without a GPU nothing can be captured: the function is run anew each time.
            capture = None if ON_GPU else lambda step: step
            self._graphs = DecodeGraphs(self.decoder, self.kv, [4], NUM_PAGES, device, capture)

    def step(self, decodes: list[Chunk], prefills: list[Chunk]) -> Tensor:
        batch = build_batch(decodes, prefills, self.page_size)
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch).cpu()
        return self.decoder.forward(batch.to(self.device), self.kv).cpu()

    def logits(self) -> Tensor:
        """Of a prefill in two chunks each, then decode steps with fixed tokens."""
        pages = np.random.default_rng(1).permutation(NUM_PAGES // self.page_size)
        each = NUM_PAGES // self.page_size // 4
        owned = [pages[at * each : (at + 1) * each] for at in range(len(LENGTHS))]
        prompts = [prompt(SMALL, length, seed) for seed, length in enumerate(LENGTHS)]
        rows = list(zip(prompts, owned, strict=True))
        first = [Chunk(ids[:4], 0, own, logits=False) for ids, own in rows]
        self.step([], first)
        out = [self.step([], [Chunk(ids[4:], 4, own) for ids, own in rows])]
        for at in range(STEPS):
            tokens = prompt(SMALL, len(rows), 100 + at)
            out.append(
                self.step(
                    [
                        Chunk(tokens[row : row + 1], len(ids) + at, own)
                        for row, (ids, own) in enumerate(rows)
                    ],
                    [],
                )
            )
        return torch.cat(out)


def run(report: Report) -> None:
    cases = [("page_first", 1), ("page_first", 16), ("layer_first", 16)]
    expected = Runner(torch.float32, CPU, 1, "page_first", graphs=False).logits()
    for dtype, tolerance in TOLERANCE.items():
        for layout, page_size in cases if ON_GPU else cases[2:]:
            for graphs in (False, True):
                with gpu_kernels():
                    actual = Runner(dtype, DEVICE, page_size, layout, graphs).logits()
                off = float((actual - expected).norm() / expected.norm())
                how = "graphs" if graphs else "plain"
                name = f"model.{layout}.ps{page_size}.{how}.{str(dtype).removeprefix('torch.')}"
                good = off <= tolerance  # not for NaN either
                report(Result(name, "ok" if good else "FAILED", detail=f"off by {off:.1e}"))
