"""Prefix caches by name, so that another implementation can take the place of ours."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from pd_cluster.cache.eviction import EvictionPolicy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache


class PrefixCacheFactory(Protocol):
    """Makes a worker's cache: a `PrefixCache`, of which any method may be overridden."""

    def __call__(
        self,
        pool: PagePool,
        page_size: int,
        policy: EvictionPolicy,
        *,
        enabled: bool,
        record_events: bool,
    ) -> PrefixCache: ...


_FACTORIES: dict[str, PrefixCacheFactory] = {"radix": PrefixCache}


def register_prefix_cache(name: str, factory: PrefixCacheFactory) -> None:
    """Make `factory` known under a name that `radix_cache_backend` may then have.

    Raises:
        ValueError: the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"a prefix cache {name!r} is registered already")
    _FACTORIES[name] = factory


def prefix_cache_factory(name: str) -> PrefixCacheFactory:
    """What was registered under `name`; of `module:name` the module is imported first.

    Raises:
        ValueError: there is no such cache, or no such module; the message says what there is.
    """
    module, colon, short = name.partition(":")
    if colon:
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(f"prefix cache {name!r}: {error}") from error
    key = short if colon else name
    if key not in _FACTORIES:
        raise ValueError(f"unknown prefix cache {name!r}; registered: {', '.join(_FACTORIES)}")
    return _FACTORIES[key]
