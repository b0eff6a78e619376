"""The input of one forward pass: a ragged batch of new tokens over paged KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Of the tensors within one copy: what the widest vector loads ask for.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence: `tokens` stand at positions `start`, `start` + 1, ...

    `pages` are the sequence's pages in order, for positions 0 to the last new token at least; what
    is below `start` has been written already.
    """

    tokens: npt.ArrayLike
    start: int
    pages: npt.ArrayLike
    # After how many of the tokens, the last ones, the logits are wanted.
    logits: int = 1


@dataclass(frozen=True)
class ForwardBatch:
    """N new tokens of B sequences, the decode steps before the prefill chunks.

    Sequence b's new tokens are rows `q_indptr[b]` to `q_indptr[b + 1]`, the last of its
    `ctx_lens[b]` tokens; its pages are `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`. The first
    `num_decode` sequences have exactly one new token each.
    """

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64, page * page_size + offset
    q_indptr: Tensor  # [B + 1] int32
    kv_indptr: Tensor  # [B + 1] int32
    kv_indices: Tensor  # int32
    ctx_lens: Tensor  # [B] int32
    num_decode: int
    logits_rows: Tensor  # int64, rows of N whose logits are wanted
    on_host: ForwardBatch | None = None  # of a batch on another device: it on the CPU

    @property
    def host(self) -> ForwardBatch:
        """The batch on the CPU: what is planned by it waits for no device."""
        return self if self.on_host is None else self.on_host

    def tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> ForwardBatch:
        """The batch on another device, by one copy for which the host does not wait."""
        tensors = self.tensors()
        offsets, size = [], 0
        for each in tensors.values():
            offsets.append(size)
            size += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        # torch keeps pinned memory from reuse until the copy out of it is over.
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

        def views(memory: Tensor) -> list[Tensor]:
            pieces = zip(offsets, tensors.values(), strict=True)
            return [memory[at : at + each.nbytes].view(each.dtype) for at, each in pieces]

        for view, each in zip(views(packed), tensors.values(), strict=True):
            view.copy_(each)
        moved = views(packed.to(device, non_blocking=True))
        return ForwardBatch(
            **dict(zip(tensors, moved, strict=True)), num_decode=self.num_decode, on_host=self.host
        )


def build_batch(
    decodes: Sequence[Chunk], prefills: Sequence[Chunk], page_size: int
) -> ForwardBatch:
    """The batch of one step of each of `decodes` (one token each) and the chunks of `prefills`.

    Its logits come in that order, `logits` rows for every chunk.
    """
    chunks = [*decodes, *prefills]
    ids = [np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks]
    assert all(len(tokens) == 1 for tokens in ids[: len(decodes)])
    lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    ctx_lens = starts + lengths
    ends = lengths.cumsum()
    positions = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)

    num_pages = -(-ctx_lens // page_size)
    pages = [
        np.asarray(chunk.pages, dtype=np.int64)[:count]
        for chunk, count in zip(chunks, num_pages, strict=True)
    ]
    assert all(len(each) == count for each, count in zip(pages, num_pages, strict=True))
    kv_indices = np.concatenate(pages)
    kv_indptr = np.concatenate([[0], num_pages.cumsum()])
    page = kv_indices[np.repeat(kv_indptr[:-1], lengths) + positions // page_size]
    wanted = np.array([chunk.logits for chunk in chunks], dtype=np.int64)
    # Row by row: the last `wanted` of each chunk's rows.
    counted = np.arange(wanted.sum()) - np.repeat(wanted.cumsum() - wanted, wanted)
    logits_rows = np.repeat(ends - wanted, wanted) + counted
    return ForwardBatch(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(page * page_size + positions % page_size),
        q_indptr=_int32(np.concatenate([[0], ends])),
        kv_indptr=_int32(kv_indptr),
        kv_indices=_int32(kv_indices),
        ctx_lens=_int32(ctx_lens),
        num_decode=len(decodes),
        logits_rows=torch.from_numpy(logits_rows),
    )


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
