"""Whether a configuration's cache can be made, known before any worker is started."""

from __future__ import annotations

from pd_cluster.cache.block_log import BlockLog
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.registry import prefix_cache_factory
from pd_cluster.cache.storage import StorageError, make_storage_backend
from pd_cluster.config import Config
from pd_cluster.errors import ConfigError


def check_cache(config: Config) -> None:
    """Raises ConfigError naming the key, and what is wrong or not to be had."""
    key = "radix_eviction_policy_config"
    try:
        make_eviction_policy(config.radix_eviction_policy, config.radix_eviction_policy_config)
        key = "radix_cache_backend"
        prefix_cache_factory(config.radix_cache_backend)
        if config.enable_hierarchical_cache and config.radix_cache_backend != "radix":
            raise ValueError("only 'radix' has tiers (enable_hierarchical_cache)")
        key = "kv_events_config"
        if config.kv_events_config is not None:
            BlockLog(1, config.page_size, config.kv_events_config.block_size)
        key = "hicache_storage_backend"
        if config.hicache_storage_backend is not None:
            if not config.enable_hierarchical_cache:
                raise ValueError("storage lies below enable_hierarchical_cache, which is not set")
            extra = config.hicache_storage_backend_extra_config
            make_storage_backend(config.hicache_storage_backend, 1 << 60, extra).close()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"config key {key!r}: needs the package {error.name}, which is not installed"
        ) from error
    except (ValueError, StorageError) as error:
        raise ConfigError(f"config key {key!r}: {error}") from error
