from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.cache.page_pool import Pages

LAYOUTS = ["page_first", "layer_first"]
L, P, H, D = 3, 4, 2, 8


def layout_of(name: str, num_pages: int = 10, dtype: torch.dtype = torch.float32) -> Layout:
    return make_layout(name, num_pages, L, P, H, D, dtype, "cpu")


def fill(layout: Layout, pages: Pages) -> None:
    """Values that tell layer, K or V, place in `pages`, token, head and dimension apart."""
    for layer in range(L):
        for kv, view in enumerate((layout.k(layer), layout.v(layer))):
            block = torch.arange(len(pages) * P * H * D).view(len(pages), P, H, D)
            view[torch.from_numpy(pages.astype(np.int64))] = (block + 10_000 * (2 * layer + kv)).to(
                layout.dtype
            )


def contents(layout: Layout, pages: Pages) -> torch.Tensor:
    index = torch.from_numpy(pages.astype(np.int64))
    return torch.stack(
        [view[index] for layer in range(L) for view in (layout.k(layer), layout.v(layer))]
    )


def array(*pages: int) -> Pages:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_have_one_shape_and_do_not_overlap(name: str) -> None:
    layout = layout_of(name)
    assert layout.buffer.numel() * 4 == 10 * layout.page_bytes == 10 * L * 2 * P * H * D * 4
    for number, view in enumerate(v for i in range(L) for v in (layout.k(i), layout.v(i))):
        assert view.shape == (10, P, H, D)
        assert view.stride(-1) == 1
        assert not view.any()
        view.fill_(number + 1)
    assert layout.buffer.unique().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_rows_moves_pages_between_pools_of_different_size(
    name: str, dtype: torch.dtype
) -> None:
    source, target = layout_of(name, 10, dtype), layout_of(name, 7, dtype)
    src, dst = array(9, 2, 3, 0), array(1, 6, 5, 2)
    fill(source, src)
    source_rows = source.descriptors()[source.rows(src)]
    target_rows = target.descriptors()[target.rows(dst)]
    assert source_rows[:, 1].tolist() == target_rows[:, 1].tolist()
    for (to, length, _), (of, _, _) in zip(target_rows.tolist(), source_rows.tolist(), strict=True):
        ctypes.memmove(to, of, length)
    assert torch.equal(contents(target, dst), contents(source, src))
    assert not contents(target, array(0, 3, 4)).any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_descriptors_tile_the_region(name: str) -> None:
    layout = layout_of(name)
    descriptors = layout.descriptors()
    assert descriptors.dtype == np.uint64
    assert descriptors.flags.c_contiguous
    address, length, device_id = layout.region()
    assert (length, device_id) == (10 * layout.page_bytes, 0)
    ends = descriptors[:, 0] + descriptors[:, 1]
    assert int(descriptors[0, 0]) == address == layout.buffer.data_ptr()
    assert descriptors[1:, 0].tolist() == ends[:-1].tolist()
    assert int(ends[-1]) == address + length
    every = layout.rows(np.arange(10, dtype=np.int32))
    assert sorted(every.tolist()) == list(range(len(descriptors)))


@pytest.mark.parametrize(("name", "runs"), [("page_first", 1), ("layer_first", 2 * L)])
def test_consecutive_pages_are_consecutive_rows(name: str, runs: int) -> None:
    rows = layout_of(name).rows(array(4, 5, 6))
    assert int((np.diff(rows) != 1).sum()) + 1 == runs


@pytest.mark.parametrize("name", LAYOUTS)
def test_copy_pages(name: str) -> None:
    layout = layout_of(name)
    fill(layout, array(0, 1, 2))
    before = contents(layout, array(0, 1, 2))
    # Overlapping: all are read before any is written.
    layout.copy_pages(array(0, 1, 2), array(1, 2, 7))
    assert torch.equal(contents(layout, array(1, 2, 7)), before)
    assert torch.equal(contents(layout, array(0)), before[:, :1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_page_aligned_and_lazy(name: str) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    # 3 GiB, of which one page is touched.
    layout = make_layout(name, 65536, 3, 16, 4, 64, torch.float16, "cpu")
    assert layout.region()[1] == 3 << 30
    assert layout.buffer.data_ptr() % mmap.PAGESIZE == 0
    layout.k(0)[7].fill_(1)
    assert process.memory_info().rss - before < 256 << 20


def test_signatures_name_what_differs() -> None:
    signature = layout_of("page_first", 10).signature()
    assert signature == layout_of("page_first", 99).signature()
    assert signature.differences(signature) == []
    peer = replace(signature, layout="layer_first", page_size=16, dtype="bfloat16")
    assert signature.differences(peer) == [
        "layout is page_first here and layer_first there",
        "page_size is 4 here and 16 there",
        "dtype is float32 here and bfloat16 there",
    ]


def test_unknown_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="'rows_first'; allowed: page_first, layer_first"):
        layout_of("rows_first")


@pytest.mark.parametrize("source_name", LAYOUTS)
@pytest.mark.parametrize("target_name", LAYOUTS)
def test_pages_are_copied_between_memories_of_any_layout(
    source_name: str, target_name: str
) -> None:
    source, target = layout_of(source_name, 10), layout_of(target_name, 7)
    src, dst = array(9, 2, 3, 0, 5), array(1, 5, 6, 2, 0)
    fill(source, src)
    target.copy_from(source, src, dst)
    assert torch.equal(contents(target, dst), contents(source, src))
    assert not contents(target, array(3, 4)).any()
    target.copy_from(source, array(), array())
    assert torch.equal(source.view(2, 2)[:, 1, 0], source.k(1)[2:4])
