"""How a worker's KV memory is laid out: page-first or layer-first.

A layout allocates the memory, and hands strided views to the kernels and descriptors to the
transport. Both layouts show the same shapes, so that nothing else need know which one it is.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pd_cluster.cache.page_pool import Pages

if TYPE_CHECKING:
    from pd_cluster.types import Region

Descriptors: TypeAlias = NDArray[np.uint64]
Rows: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayoutSignature:
    """What two workers must agree on before pages can move between them."""

    layout: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def differences(self, peer: LayoutSignature) -> list[str]:
        """One phrase for each field that differs, e.g. `page_size is 16 here and 1 there`."""
        names = [field.name for field in fields(self)]
        return [
            f"{name} is {getattr(self, name)} here and {getattr(peer, name)} there"
            for name in names
            if getattr(self, name) != getattr(peer, name)
        ]


class Layout(ABC):
    """KV memory for `num_pages` pages of `page_size` tokens each, zeroed.

    `buffer` is the whole memory as one tensor, shaped as the layout says. On the CPU it is
    page-aligned and touched lazily: what no one has written takes no memory.
    """

    name: str

    def __init__(
        self,
        num_pages: int,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        # KV of one page, one layer, K or V.
        self._block_bytes = page_size * num_kv_heads * head_dim * dtype.itemsize
        self.page_bytes = num_layers * 2 * self._block_bytes
        self.buffer = _zeros(self._shape(), dtype, torch.device(device))

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def mem_type(self) -> str:
        """What transfer descriptors of this memory are: "DRAM", or "VRAM" of a GPU."""
        return "VRAM" if self.buffer.device.type == "cuda" else "DRAM"

    @abstractmethod
    def _shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer: a view, [num_pages, page_size, num_kv_heads, head_dim]."""

    @abstractmethod
    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer: a view, [num_pages, page_size, num_kv_heads, head_dim]."""

    @abstractmethod
    def descriptors(self, region: Region | None = None) -> Descriptors:
        """Every contiguous block as a row (address, bytes, device id): [rows, 3] uint64.

        Of this memory, or of a peer's with an equal signature, by its `region()`.
        """

    @abstractmethod
    def rows(self, pages: Pages, num_pages: int | None = None) -> Rows:
        """Indices into `descriptors()` of these pages; of a peer's with its `num_pages`.

        For equally many pages of a pool with an equal `signature()` the i-th row there holds what
        the i-th row here holds, whatever the number of pages of either pool.
        """

    @abstractmethod
    def copy_pages(self, src: Pages, dst: Pages) -> None:
        """Copy page `src[i]` to `dst[i]`; as if all were read before any is written."""

    @abstractmethod
    def view(self, first: int, count: int) -> torch.Tensor:
        """Consecutive pages, [count, num_layers, 2, page_size, num_kv_heads, head_dim], by any
        layout: a view."""

    def copy_from(self, source: Layout, src: Pages, dst: Pages) -> None:
        """Copy pages `src` of another memory to pages `dst` of this one, of any two layouts."""
        breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
        bounds = [0, *breaks.tolist(), src.size]
        for at, end in zip(bounds, bounds[1:], strict=False):
            if end > at:
                pages = source.view(int(src[at]), end - at)
                self.view(int(dst[at]), end - at).copy_(pages, non_blocking=True)

    def region(self) -> Region:
        """(address, bytes, device id) of the whole memory, for registering it."""
        return self.buffer.data_ptr(), self.num_pages * self.page_bytes, self._device_id

    def signature(self) -> LayoutSignature:
        return LayoutSignature(
            layout=self.name,
            page_size=self.page_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    @property
    def _device_id(self) -> int:
        return self.buffer.device.index or 0

    def _blocks(self, block_bytes: int, region: Region | None) -> Descriptors:
        """The whole memory cut into equal blocks, in address order."""
        address, length, device_id = region or self.region()
        blocks = np.empty((length // block_bytes, 3), np.uint64)
        blocks[:, 0] = np.arange(address, address + length, block_bytes, dtype=np.uint64)
        blocks[:, 1] = block_bytes
        blocks[:, 2] = device_id
        return blocks

    def _index(self, pages: Pages) -> torch.Tensor:
        index = torch.from_numpy(pages.astype(np.int64))
        if self.buffer.is_cuda:
            index = index.pin_memory()  # else the host would wait for the copy
        return index.to(self.buffer.device, non_blocking=True)


class PageFirstLayout(Layout):
    """[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]: a page is one block."""

    name = "page_first"

    def _shape(self) -> tuple[int, ...]:
        return (
            self.num_pages,
            self.num_layers,
            2,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
        )

    def k(self, layer: int) -> torch.Tensor:
        return self.buffer[:, layer, 0]

    def v(self, layer: int) -> torch.Tensor:
        return self.buffer[:, layer, 1]

    def descriptors(self, region: Region | None = None) -> Descriptors:
        return self._blocks(self.page_bytes, region)

    def rows(self, pages: Pages, num_pages: int | None = None) -> Rows:
        return pages.astype(np.int64)

    def view(self, first: int, count: int) -> torch.Tensor:
        return self.buffer[first : first + count]

    def copy_pages(self, src: Pages, dst: Pages) -> None:
        self.buffer[self._index(dst)] = self.buffer[self._index(src)]


class LayerFirstLayout(Layout):
    """[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]: a page is many blocks."""

    name = "layer_first"

    def _shape(self) -> tuple[int, ...]:
        return (
            self.num_layers,
            2,
            self.num_pages,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
        )

    def k(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, 0]

    def v(self, layer: int) -> torch.Tensor:
        return self.buffer[layer, 1]

    def descriptors(self, region: Region | None = None) -> Descriptors:
        return self._blocks(self._block_bytes, region)

    def rows(self, pages: Pages, num_pages: int | None = None) -> Rows:
        # Pages innermost: runs of consecutive pages stay runs within each layer, and merge.
        slabs = np.arange(self.num_layers * 2, dtype=np.int64) * (num_pages or self.num_pages)
        return (slabs[:, None] + pages).ravel()

    def view(self, first: int, count: int) -> torch.Tensor:
        return self.buffer[:, :, first : first + count].permute(2, 0, 1, 3, 4, 5)

    def copy_pages(self, src: Pages, dst: Pages) -> None:
        self.buffer[:, :, self._index(dst)] = self.buffer[:, :, self._index(src)]


_LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (PageFirstLayout, LayerFirstLayout)
}


def make_layout(
    name: str,
    num_pages: int,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Layout:
    """Allocate KV memory in the layout of that name.

    Raises:
        ValueError: there is no such layout.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"unknown KV layout {name!r}; allowed: {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name](num_pages, num_layers, page_size, num_kv_heads, head_dim, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory is zero already, aligned to the machine's pages and not there before it is
    # touched. The tensor keeps the mapping alive. Private, for shared memory would count against
    # the limit of /dev/shm in a container.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
