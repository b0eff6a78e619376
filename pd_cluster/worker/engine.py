"""The worker's model and KV memory: runs the steps that the scheduler plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.config import Config
from pd_cluster.draw import Drawn
from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.choose import choose
from pd_cluster.model.decoder import Decoder
from pd_cluster.worker.instructions import Batch, Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Engine:
    """A decoder and its paged KV memory. Used by one thread."""

    def __init__(self, decoder: Decoder, layout: Layout) -> None:
        self.decoder = decoder
        self.layout = layout

    @classmethod
    def load(cls, folder: Path, config: Config) -> Engine:
        """Raises ModelError where the folder holds no model that can be served."""
        dtype = DTYPES[config.dtype]
        decoder = Decoder.load(folder, dtype)
        model = decoder.config
        layout = make_layout(
            config.layout,
            config.num_pages,
            model.num_layers,
            config.page_size,
            model.num_kv_heads,
            model.head_dim,
            dtype,
            "cpu",
        )
        return cls(decoder, layout)

    def run(self, batch: Batch) -> list[Drawn]:
        """Computes every row; a token for each row that asked, decode rows first."""
        for source, target in batch.copies:
            self.layout.copy_pages(np.array([source], np.int32), np.array([target], np.int32))
        chunks = [_chunk(row) for row in batch.rows]
        decodes = len(batch.decode)
        forward = build_batch(chunks[:decodes], chunks[decodes:], self.layout.page_size)
        logits = self.decoder.forward(forward, self.layout)
        draws = [row.draw for row in batch.rows if row.draw is not None]
        return choose(logits, draws) if draws else []

    def warm_up(self) -> None:
        """One step of each kind, so that the first request pays for no lazy initialisation.

        Writes to page 0 on, so only before anything was allocated.
        """
        tokens = min(64, self.layout.num_pages * self.layout.page_size - 1)
        pages = np.arange(-(-(tokens + 1) // self.layout.page_size))
        prefill = Chunk(np.zeros(tokens, np.int64), 0, pages)
        decode = Chunk(np.zeros(1, np.int64), tokens, pages)
        size = self.layout.page_size
        self.decoder.forward(build_batch([], [prefill], size), self.layout)
        self.decoder.forward(build_batch([decode], [], size), self.layout)

    def signature(self, model_id: str) -> dict[str, str]:
        """What workers must agree on to exchange pages."""
        layout = self.layout.signature()
        fields = {name: str(getattr(layout, name)) for name in layout.__slots__}
        return {"model": model_id, **fields}


def _chunk(row: Row) -> Chunk:
    return Chunk(row.tokens, row.start, row.pages, logits=row.draw is not None)
