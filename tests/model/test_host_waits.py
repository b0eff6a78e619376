"""Within a step the host waits for the device once, for the tokens.

On a GPU these operations give the host a value that the device has yet to compute. Here, on the
CPU, they are caught where they would be called there: in the model with Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decode_graphs import DecodeGraphs
from pd_cluster.model.decoder import Decoder
from pd_cluster.model.device_sampling import sample_on_device
from pd_cluster.types import SamplingParams
from pd_kernels import registry
from tests.model.tiny import VOCAB, Runner, save_tiny

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::argwhere",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::repeat_interleave.self_Tensor",
    "aten::bincount",
}


class Waits(TorchDispatchMode):
    """What the host would wait for, by name; so is an index that is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        masked = name.startswith("aten::index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for indices in args
            if isinstance(indices, (list, tuple))
            for each in indices
        )
        if name in WAITING or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    with Waits() as mode:
        yield mode.seen


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    save_tiny(tmp_path, family="qwen3", num_hidden_layers=2, head_dim=16)
    decoder = Decoder.load(tmp_path, torch.float32)
    with registry.preferring("cpu", "triton"):
        yield Runner(decoder, "page_first", 4, torch.float32, num_pages=32)


def chunk(tokens: list[int], start: int, pages: list[int], logits: bool = True) -> Chunk:
    return Chunk(np.array(tokens), start, np.array(pages), logits)


def test_a_mixed_step_waits_for_nothing(runner: Runner) -> None:
    runner.step([], [chunk([3, 1, 4], 0, [2])])
    batch = build_batch(
        [chunk([5], 3, [2])], [chunk([9, 2, 6, 5, 3], 0, [7, 1]), chunk([1], 0, [9], False)], 4
    )
    moved = batch.to(torch.device("cpu"))
    with waits() as seen:
        logits = runner.decoder.forward(moved, runner.kv)
    assert seen == []
    assert logits.shape == (2, VOCAB)


@pytest.mark.parametrize("all_logits", [True, False])
def test_a_replayed_step_waits_for_nothing(runner: Runner, all_logits: bool) -> None:
    graphs = DecodeGraphs(
        runner.decoder, runner.kv, [4], 64, torch.device("cpu"), lambda step: step
    )
    batch = build_batch([chunk([5], 0, [2]), chunk([6], 0, [3], all_logits)], [], 4)
    with waits() as seen:
        logits = graphs.run(batch)
    assert seen == []
    assert len(logits) == 1 + all_logits


def test_drawing_waits_for_the_tokens_alone() -> None:
    with registry.preferring("cpu", "triton"):
        params = [
            SamplingParams(max_tokens=9, temperature=0.0),
            SamplingParams(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=3),
        ]
        with waits() as seen:
            tokens = sample_on_device(torch.randn(2, 50), params, [0, 0], [7, 9])
    assert seen == []  # `tolist` copies, and is the one place where the host waits
    assert len(tokens) == 2


@pytest.mark.parametrize("inference", [True, False])
def test_what_waits_is_seen(inference: bool) -> None:
    x = torch.tensor([1.0, 0.0])
    waited: list[Callable[[], object]] = [
        lambda: x[0].item(),
        lambda: bool(x.sum() > 0),
        lambda: x[x > 0],
        lambda: torch.nonzero(x),
        lambda: torch.repeat_interleave(x, torch.tensor([1, 2])),
    ]
    for each in waited:
        with torch.inference_mode(inference), waits() as seen:
            each()
        assert seen
