"""What carries out the copies, on real memory and a real folder."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster.cache.layout import Layout, make_layout
from pd_cluster.cache.page_pool import Pages
from pd_cluster.cache.storage import StorageBackend, StorageError
from pd_cluster.cache.storage_file import FileStorage
from pd_cluster.cache.tier_ops import (
    CopyIn,
    CopyOut,
    FetchBlocks,
    ProbeBlocks,
    StopFetch,
    StoreBlocks,
    TierEvent,
)
from pd_cluster.config import Config
from pd_cluster.worker.cache import make_cache, store_name
from pd_cluster.worker.tier_io import FETCH_BATCH, TierIO, make_host_memory

BLOCK = 8
LAYOUTS = ["page_first", "layer_first"]


def memory(layout: str, page_size: int, dtype: torch.dtype = torch.float32) -> Layout:
    made = make_layout(layout, 256 // page_size, 2, page_size, 1, 4, dtype, "cpu")
    made.buffer.copy_(torch.arange(made.buffer.numel()).view(made.buffer.shape) % 251)
    return made


def contents(layout: Layout, pages: Pages) -> torch.Tensor:
    return torch.cat([layout.view(int(page), 1) for page in pages])


class Rig:
    def __init__(
        self, device: Layout, storage: StorageBackend | None = None, model: str = "m"
    ) -> None:
        self.device = device
        self.host = make_host_memory(device, device.num_pages)
        self.events: queue.SimpleQueue[TierEvent] = queue.SimpleQueue()
        self.io = TierIO(
            device,
            self.host,
            self.events.put,
            storage=storage,
            signature={"model": model},
            block=BLOCK,
        )

    def wait(self) -> TierEvent:
        """The end of an operation."""
        while True:
            event = self.events.get(timeout=60)
            if event.done:
                return event


def shuffled(count: int, seed: int) -> Pages:
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_go_to_the_host_and_come_back(layout: str, page_size: int) -> None:
    rig = Rig(memory(layout, page_size))
    count = rig.device.num_pages // 2
    source, below = shuffled(count, 1), shuffled(count, 2)
    target = shuffled(count, 3) + count
    before = contents(rig.device, source).clone()
    rig.io.submit(CopyOut(1, source, below, now=False))
    assert rig.wait().error == ""
    assert torch.equal(contents(rig.host, below), before)
    rig.io.submit(CopyIn(2, below, target.astype(np.int32)))
    event = rig.wait()
    assert (event.op, event.error) == (2, "")
    assert event.seconds > 0
    assert torch.equal(contents(rig.device, target), before)


def test_what_is_urgent_is_copied_before_submit_returns() -> None:
    rig = Rig(memory("page_first", 1))
    pages = np.arange(10, dtype=np.int32)
    before = contents(rig.device, pages).clone()
    rig.io.submit(CopyOut(1, pages, pages, now=True))
    rig.device.buffer.zero_()
    assert torch.equal(contents(rig.host, pages), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 8])
def test_blocks_are_stored_and_found_by_another_process(
    layout: str, dtype: torch.dtype, page_size: int, tmp_path: Path
) -> None:
    rig = Rig(memory(layout, page_size, dtype), FileStorage(tmp_path, 1 << 30))
    tokens = np.arange(12 * BLOCK, dtype=np.int32)
    pages = shuffled(rig.host.num_pages, 1)[: tokens.size // page_size]
    rig.host.buffer.copy_(torch.arange(rig.host.buffer.numel()).view(rig.host.buffer.shape) % 127)
    rig.io.submit(StoreBlocks(1, tokens, "salt", 0, pages))
    assert rig.wait().error == ""

    other = Rig(memory(layout, page_size, dtype), FileStorage(tmp_path, 1 << 30))
    longer = np.concatenate([tokens, tokens])
    found = []
    for namespace, start in (("salt", 0), ("salt", 3 * BLOCK), (None, 0)):
        other.io.submit(ProbeBlocks(2, longer, namespace, start))
        found.append(other.wait().tokens)
    assert found == [12 * BLOCK, 9 * BLOCK, 0]
    target = shuffled(other.host.num_pages, 2)[: 11 * BLOCK // page_size]
    other.io.submit(FetchBlocks(3, tokens, "salt", BLOCK, target))
    parts = []
    while not parts or not parts[-1].done:
        parts.append(other.events.get(timeout=60))
    assert [part.tokens for part in parts] == [FETCH_BATCH * BLOCK, 11 * BLOCK]
    assert torch.equal(
        contents(other.host, target), contents(rig.host, pages[BLOCK // page_size :])
    )


def test_another_models_blocks_are_not_found(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, 1 << 30)
    tokens = np.arange(BLOCK, dtype=np.int32)
    rig = Rig(memory("page_first", 1), storage, model="a")
    rig.io.submit(StoreBlocks(1, tokens, None, 0, np.arange(BLOCK, dtype=np.int32)))
    rig.wait()
    for model, expected in (("a", BLOCK), ("b", 0)):
        other = Rig(memory("page_first", 1), storage, model=model)
        other.io.submit(ProbeBlocks(1, tokens, None, 0))
        assert other.wait().tokens == expected


class Slow(FileStorage):
    """Reads one batch for each permission."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self.allowed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def get(self, keys: list[bytes], blocks: list[memoryview]) -> int:  # type: ignore[override]
        self.allowed.get(timeout=60)
        return super().get(keys, blocks)


def test_a_stopped_fetch_ends_between_two_batches(tmp_path: Path) -> None:
    storage = Slow(tmp_path)
    rig = Rig(memory("page_first", 1), storage)
    tokens = np.arange(20 * BLOCK, dtype=np.int32)
    rig.io.submit(StoreBlocks(1, tokens, None, 0, np.arange(20 * BLOCK, dtype=np.int32)))
    rig.wait()
    rig.io.submit(FetchBlocks(2, tokens, None, 0, np.arange(20 * BLOCK, dtype=np.int32)))
    storage.allowed.put(None)
    assert rig.events.get(timeout=60) == TierEvent(2, FETCH_BATCH * BLOCK, done=False)
    rig.io.submit(StopFetch(2))
    for _ in range(3):
        storage.allowed.put(None)
    event = rig.wait()
    assert event.op == 2
    assert event.tokens < 20 * BLOCK


class Broken(FileStorage):
    def exists(self, keys: object) -> int:
        self.asked = getattr(self, "asked", 0) + 1
        raise StorageError("no route to host")


def test_a_store_that_fails_is_reported_and_then_left_alone(tmp_path: Path) -> None:
    storage = Broken(tmp_path, 1 << 30)
    rig = Rig(memory("page_first", 1), storage)
    tokens = np.arange(2 * BLOCK, dtype=np.int32)
    errors = []
    for op in range(3):
        rig.io.submit(ProbeBlocks(op, tokens, None, 0))
        errors.append(rig.wait().error)
    assert errors == ["no route to host", *["it failed a moment ago"] * 2]
    assert storage.asked == 1


def test_the_configuration_makes_the_cache(tmp_path: Path) -> None:
    def make(**settings: object) -> tuple[str, int | None]:
        config = Config.model_validate({"max_total_tokens": 256, **settings})
        layout = memory("page_first", 1)
        cache, io = make_cache(config, "decode", layout, {"model": "m"}, lambda event: None)
        return type(cache).__name__ + str(cache.enabled), io and io.host.num_pages

    assert make() == ("PrefixCacheTrue", None)
    assert make(disable_radix_cache=True) == ("PrefixCacheFalse", None)
    assert make(disable_radix_cache="decode") == ("PrefixCacheFalse", None)
    assert make(disable_radix_cache="prefill") == ("PrefixCacheTrue", None)
    tiers = {"enable_hierarchical_cache": True}
    assert make(**tiers) == ("TieredCacheTrue", 512)
    assert make(**tiers, hicache_ratio=0.5) == ("TieredCacheTrue", 128)
    page_bytes = memory("page_first", 1).page_bytes
    assert make(**tiers, hicache_size=page_bytes * 100.5 / (1 << 30)) == ("TieredCacheTrue", 100)
    assert make(**tiers, disable_radix_cache="decode") == ("PrefixCacheFalse", None)
    with pytest.raises(ValueError, match="unknown storage backend 'flie'"):
        make(**tiers, hicache_storage_backend="flie")
    with pytest.raises(ValueError, match="needs radix_cache_backend 'radix'"):
        make(**tiers, radix_cache_backend="mine")
    with pytest.raises(ValueError, match="unknown prefix cache 'mine'"):
        make(radix_cache_backend="mine")
    with pytest.raises(ValueError, match="nothing to extend"):
        make(**tiers, disable_radix_cache=True)


def test_who_shares_a_store_says_the_same() -> None:
    def name(host: str, **settings: object) -> str:
        tiers = {"enable_hierarchical_cache": True, **settings}
        return store_name(Config.model_validate(tiers), host)

    assert name("one") == ""
    assert name("one", hicache_storage_backend="redis") == name(
        "two", hicache_storage_backend="redis"
    )
    path = {"hicache_storage_backend_extra_config": {"path": "/kv"}}
    folders = {name(host, hicache_storage_backend="file", **path) for host in ("one", "two")}
    assert len(folders) == 2, "a folder is one host's"
