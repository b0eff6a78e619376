"""The worker's model and KV memory: runs the steps that the scheduler plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.config import Config
from pd_cluster.draw import Drawn, Scores
from pd_cluster.errors import StartError
from pd_cluster.model.batch import Chunk, ForwardBatch, build_batch
from pd_cluster.model.choose import choose
from pd_cluster.model.decode_graphs import DecodeGraphs, bucket_sizes
from pd_cluster.model.decoder import Decoder
from pd_cluster.model.score import score
from pd_cluster.worker.instructions import Batch, Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str) -> torch.device:
    """What `device` of the configuration means in this process, which sees what GPUs Ray gave it.

    Raises StartError where a GPU is asked for and there is none.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", 0)
    if wanted == "cuda":
        build = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise StartError(f"device cuda: torch sees no GPU in this worker{build}")
    return torch.device("cpu")


class Engine:
    """A decoder and its paged KV memory, on one device. Used by one thread.

    On a GPU, decode steps of up to `max_running` sequences are CUDA graphs after `warm_up`.
    """

    def __init__(self, decoder: Decoder, layout: Layout, max_running: int = 1) -> None:
        self.decoder = decoder
        self.layout = layout
        self.max_running = max_running
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, folder: Path, config: Config) -> Engine:
        """
        Raises:
            ModelError: the folder holds no model that can be served.
            StartError: there is no GPU, where one is asked for, or the model and its KV memory do
                not fit into it.
        """
        dtype = DTYPES[config.dtype]
        device = pick_device(config.device)
        try:
            decoder = Decoder.load(folder, dtype, device)
            model = decoder.config
            layout = make_layout(
                config.layout,
                config.num_pages,
                model.num_layers,
                config.page_size,
                model.num_kv_heads,
                model.head_dim,
                dtype,
                device,
            )
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"the model and {config.max_total_tokens} tokens of KV (max_total_tokens) do not"
                f" fit into {torch.cuda.get_device_name(device)}: {error}"
            ) from error
        return cls(decoder, layout, config.max_running_requests)

    def run(self, batch: Batch) -> list[Drawn]:
        """Computes every row; what each row that asked wanted of its logits, decode rows first.

        All that was computed is in the device's memory then: pages may be published and sent.
        """
        for source, target in batch.copies:
            self.layout.copy_pages(np.array([source], np.int32), np.array([target], np.int32))
        chunks = [_chunk(row) for row in batch.rows]
        decodes = len(batch.decode)
        forward = build_batch(chunks[:decodes], chunks[decodes:], self.layout.page_size)
        logits = self._forward(forward)
        rows = [row for row in batch.rows if row.asks]
        if any(row.known is not None for row in rows):
            return _score_and_choose(logits, rows)
        if rows:
            # Which waits for the device.
            return choose(logits, [row.draw for row in rows if row.draw is not None])
        if self.layout.device.type == "cuda":
            torch.cuda.current_stream(self.layout.device).synchronize()
        return []

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)
        if self.layout.device.type != "cpu":
            batch = batch.to(self.layout.device)
        return self.decoder.forward(batch, self.layout)

    def warm_up(self) -> None:
        """One step of each kind, so that the first request pays for no lazy initialisation.

        Writes to page 0 on, so only before anything was allocated.
        """
        tokens = min(64, self.layout.num_pages * self.layout.page_size - 1)
        pages = np.arange(-(-(tokens + 1) // self.layout.page_size))
        prefill = Chunk(np.zeros(tokens, np.int64), 0, pages)
        decode = Chunk(np.zeros(1, np.int64), tokens, pages)
        size = self.layout.page_size
        self._forward(build_batch([], [prefill], size))
        self._forward(build_batch([decode], [], size))
        if self.layout.device.type == "cuda":
            self._graphs = self._capture()

    def _capture(self) -> DecodeGraphs:
        pages = -(-self.decoder.config.max_positions // self.layout.page_size)
        # Sequences share pages, so together they may name more than the pool has.
        most_pages = self.max_running * min(pages, self.layout.num_pages)
        return DecodeGraphs(
            self.decoder,
            self.layout,
            bucket_sizes(self.max_running),
            most_pages,
            self.layout.device,
        )

    def signature(self, model_id: str) -> dict[str, str]:
        """What workers must agree on to exchange pages."""
        layout = self.layout.signature()
        fields = {name: str(getattr(layout, name)) for name in layout.__slots__}
        return {"model": model_id, **fields}


def _chunk(row: Row) -> Chunk:
    return Chunk(row.tokens, row.start, row.pages, logits=row.num_logits)


def _score_and_choose(logits: Tensor, rows: list[Row]) -> list[Drawn]:
    """Where known tokens are scored beside those that are chosen."""
    scored: list[Scores | None] = []
    last: list[int] = []  # of a row's logits, from which it draws
    at = 0
    for row in rows:
        known = row.known
        if known is not None:
            scored.append(score(logits[at : at + len(known.tokens)], known))
        else:
            scored.append(None)
        at += row.num_logits
        if row.draw is not None:
            last.append(at - 1)
    draws = [row.draw for row in rows if row.draw is not None]
    chosen = iter(choose(logits[last], draws) if draws else ())
    none = Drawn(None)
    drawn = [next(chosen) if row.draw is not None else none for row in rows]
    return [each._replace(scores=scores) for each, scores in zip(drawn, scored, strict=True)]
