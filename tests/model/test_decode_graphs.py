"""Decode by captured graphs: what the capture gets to see, with kernels that a GPU would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decode_graphs import DecodeGraphs, bucket_sizes, filled_up
from pd_cluster.model.decoder import Decoder
from pd_kernels import registry
from tests.kernels.fake_flashinfer import DECODE, PREFILL, FakeFlashinfer
from tests.model.tiny import Runner, save_tiny

CPU = torch.device("cpu")


def chunk(tokens: list[int], start: int, pages: list[int]) -> Chunk:
    return Chunk(np.array(tokens), start, np.array(pages))


def test_buckets_cover_every_batch_closely() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 4]
    assert bucket_sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert bucket_sizes(130)[-2:] == [128, 144]
    for most in range(1, 300):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most
        assert all(later - size <= max(8, size // 8) for size, later in pairwise(sizes))


def test_filling_up_adds_rows_that_write_nothing() -> None:
    batch = build_batch([chunk([5], 2, [7, 3, 1]), chunk([6], 0, [2])], [], 1)
    full = filled_up(batch, 4)
    assert full.num_decode == 4
    assert full.slots.tolist() == [1, 2, -1, -1]
    assert full.ctx_lens.tolist() == [3, 1, 1, 1]
    assert full.kv_indptr.tolist() == [0, 3, 4, 5, 6]
    assert full.kv_indices.tolist() == [7, 3, 1, 2, 0, 0]
    assert full.q_indptr.tolist() == full.logits_rows.tolist() + [4] == [0, 1, 2, 3, 4]
    assert full.input_ids.tolist() == [5, 6, 0, 0]
    assert full.positions.tolist() == [2, 0, 0, 0]


def test_a_moved_batch_is_equal_to_the_original() -> None:
    batch = build_batch([chunk([5], 2, [7, 3, 1])], [chunk([1, 2, 3], 0, [0, 4, 2])], 1)
    moved = batch.to(CPU)
    assert moved.num_decode == batch.num_decode
    for name, tensor in batch.tensors().items():
        assert torch.equal(moved.tensors()[name], tensor)
        assert moved.tensors()[name].dtype == tensor.dtype


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    save_tiny(tmp_path, num_hidden_layers=2)
    decoder = Decoder.load(tmp_path, torch.float32)
    # These take rows without a context and without a slot; the CPU's own refuse them.
    with registry.preferring("cpu", "triton"):
        yield Runner(decoder, "page_first", 4, torch.float32, num_pages=32)


@pytest.fixture
def planned_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """With a stand-in for flashinfer, which runs only what was planned for its lengths."""
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    save_tiny(tmp_path, num_hidden_layers=2, head_dim=64)
    fake = FakeFlashinfer()
    monkeypatch.setattr("pd_kernels.flashinfer_kernels.working", lambda: fake)
    with registry.preferring("cpu", "flashinfer", "triton"):
        decoder = Decoder.load(tmp_path, torch.bfloat16)
        yield Runner(decoder, "page_first", 4, torch.bfloat16, num_pages=32)
    assert {"page.append_paged_kv_cache", f"{DECODE}.run", f"{PREFILL}.run"} <= set(fake.names())


@pytest.mark.parametrize(("fixture", "tolerance"), [("runner", 1e-5), ("planned_runner", 5e-2)])
def test_replayed_steps_are_those_of_a_plain_forward_pass(
    request: pytest.FixtureRequest, fixture: str, tolerance: float
) -> None:
    """The captured functions run anew here, but on what a graph has: its memory and batch size."""
    runner: Runner = request.getfixturevalue(fixture)
    captured: list[Callable[[], None]] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        captured.append(step)
        return step

    graphs = DecodeGraphs(runner.decoder, runner.kv, [1, 4], 64, CPU, capture)
    assert len(captured) == 2
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
    pages = [runner.pages(12) for _ in prompts]
    for prompt, own in zip(prompts, pages, strict=True):
        runner.step([], [chunk(prompt, 0, own)])
    for taken in ([0, 1, 2], [2], [1, 0]):
        rows = [chunk([40 + each], len(prompts[each]), pages[each]) for each in taken]
        batch = build_batch(rows, [], runner.page_size)
        assert graphs.fits(batch)
        got = graphs.run(batch).clone()
        written = runner.kv.buffer.clone()
        plain = runner.decoder.forward(batch, runner.kv)
        torch.testing.assert_close(got, plain, rtol=tolerance, atol=tolerance)
        # Neither path wrote anything that the other did not.
        torch.testing.assert_close(
            runner.kv.buffer, written, rtol=tolerance, atol=tolerance, equal_nan=True
        )


def test_other_batches_do_not_fit(runner: Runner) -> None:
    graphs = DecodeGraphs(runner.decoder, runner.kv, [1, 2], 4, CPU, lambda step: step)
    one = chunk([1], 0, [0])
    assert graphs.fits(build_batch([one, one], [], 4))
    assert not graphs.fits(build_batch([one, one, one], [], 4))
    assert not graphs.fits(build_batch([one], [one], 4))
    assert not graphs.fits(build_batch([], [one], 4))
    assert not graphs.fits(build_batch([chunk([1], 19, list(range(5)))], [], 4))
