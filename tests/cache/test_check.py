"""What cannot work is said before anything starts, and names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cache.check import check_cache
from pd_cluster.config import validate_config
from pd_cluster.errors import ConfigError

TIERS = {"enable_hierarchical_cache": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "radix_eviction_policy": "slru",
                "radix_eviction_policy_config": {"protected_treshold": 4},
            },
            "'radix_eviction_policy_config': eviction policy 'slru' has no key",
        ),
        (
            {"radix_eviction_policy_config": {"protected_threshold": 4}},
            "eviction policy 'lru' has no key 'protected_threshold'",
        ),
        ({"radix_cache_backend": "mine"}, "'radix_cache_backend': unknown prefix cache 'mine'"),
        ({"hicache_storage_backend": "file"}, "enable_hierarchical_cache, which is not set"),
        (
            {**TIERS, "hicache_storage_backend": "flie"},
            "'hicache_storage_backend': unknown storage backend 'flie'; known: file, redis",
        ),
        (
            {
                **TIERS,
                "hicache_storage_backend": "redis",
                "hicache_storage_backend_extra_config": {"url": "redis://127.0.0.1:1"},
            },
            "'hicache_storage_backend': storage backend 'redis': ",
        ),
        (
            {"page_size": 64, "kv_events_config": {"block_size": 48}},
            "'kv_events_config': blocks of 48 tokens do not fit pages of 64",
        ),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cache(validate_config(settings))


def test_what_is_right_passes(tmp_path: Path) -> None:
    check_cache(validate_config({}))
    folder = tmp_path / "kv"
    extra = {"path": str(folder)}
    settings = {
        **TIERS,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": extra,
        "kv_events_config": {"block_size": 16},
    }
    check_cache(validate_config(settings))
    assert folder.is_dir()
