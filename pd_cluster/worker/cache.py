"""Makes a worker's prefix cache, and what carries out its copies, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pd_cluster.cache.block_hash import BLOCK_TOKENS
from pd_cluster.cache.eviction import EvictionPolicy, make_eviction_policy
from pd_cluster.cache.layout import Layout
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.registry import prefix_cache_factory
from pd_cluster.cache.storage import make_storage_backend
from pd_cluster.cache.tier_ops import TierEvent
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.config import Config
from pd_cluster.types import Role
from pd_cluster.worker.tier_io import TierIO, make_host_memory

_GB = 1 << 30


def make_cache(
    config: Config,
    role: Role,
    layout: Layout,
    signature: Mapping[str, str],
    report: Callable[[TierEvent], None],
) -> tuple[PrefixCache, TierIO | None]:
    """A cache over the pages of `layout`, and the tiers' copying where there are any.

    `report` is called from other threads. Raises ValueError where a backend's or a policy's
    configuration is wrong, StorageError where a store cannot be reached.
    """
    enabled = config.keeps_prefixes(role)
    pool = PagePool(config.num_pages)
    if not (config.enable_hierarchical_cache and enabled):
        factory = prefix_cache_factory(config.radix_cache_backend)
        cache = factory(
            pool, config.page_size, _policy(config), enabled=enabled, record_events=True
        )
        return cache, None
    if config.radix_cache_backend != "radix":
        raise ValueError(
            f"enable_hierarchical_cache needs radix_cache_backend 'radix', not"
            f" {config.radix_cache_backend!r}"
        )
    host_pages = int(config.num_pages * config.hicache_ratio)
    if config.hicache_size:
        host_pages = int(config.hicache_size * _GB) // layout.page_bytes
    host_pool = PagePool(max(1, host_pages))
    block = max(BLOCK_TOKENS, config.page_size)
    storage = None
    if config.hicache_storage_backend is not None:
        storage = make_storage_backend(
            config.hicache_storage_backend,
            int(config.hicache_storage_size * _GB),
            config.hicache_storage_backend_extra_config,
        )
    host = PrefixCache(
        host_pool, config.page_size, _policy(config), record_events=True, tier="host"
    )
    cache = TieredCache(
        pool,
        config.page_size,
        _policy(config),
        host=host,
        record_events=True,
        write_policy=config.hicache_write_policy,
        storage_block=None if storage is None else block,
        prefetch_policy=config.hicache_storage_prefetch_policy,
    )
    # How pages lie on the device does not matter below it.
    below = {key: value for key, value in signature.items() if key != "layout"}
    io = TierIO(
        layout,
        make_host_memory(layout, host_pool.num_pages),
        report,
        storage=storage,
        signature=below,
        block=block,
    )
    return cache, io


def store_name(config: Config, host: str) -> str:
    """Which store a worker with a host tier has below it on `host`, "" for none.

    Workers that say the same share it: all of them, but that a folder is one host's. The
    configuration, and so the folder or the server, is the same for all.
    """
    backend = config.hicache_storage_backend
    if backend is None:
        return ""
    return f"file@{host}" if backend == "file" else backend


def _policy(config: Config) -> EvictionPolicy:
    return make_eviction_policy(config.radix_eviction_policy, config.radix_eviction_policy_config)
