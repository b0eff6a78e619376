"""Blocks in a Redis or Valkey server: the network store that most already run.

It is asked for nothing but GET, SET and EXISTS of binary strings. How much it keeps, and what it
drops first, is set there (`maxmemory`, `maxmemory-policy allkeys-lru`); blocks that it drops are
misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from pd_cluster.cache.storage import (
    HEADER_BYTES,
    StorageBackend,
    StorageError,
    check_config,
    header_fits,
    pack_header,
)

_PREFIX = b"pdkv:"
_CLEAR_BATCH = 1000


class RedisStorage(StorageBackend):
    """`url` as redis-py takes it, e.g. `redis://:password@host:6379/0`, `rediss://`, `unix://`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._client = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )
        try:
            self._client.ping()
        except redis.RedisError as error:
            raise StorageError(f"storage backend 'redis': {error}") from error

    def exists(self, keys: Sequence[bytes]) -> int:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(_PREFIX + key)
                answers = pipeline.execute()
        except redis.RedisError as error:
            raise StorageError(str(error)) from error
        return next((i for i, there in enumerate(answers) if not there), len(keys))

    def get(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        # One at a time: an answer with many blocks would be held in memory as a whole.
        for found, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            try:
                data = self._client.get(_PREFIX + key)
            except redis.RedisError as error:
                raise StorageError(str(error)) from error
            if not isinstance(data, bytes) or len(data) != HEADER_BYTES + block.nbytes:
                return found
            block[:] = memoryview(data)[HEADER_BYTES:]
            if not header_fits(data[:HEADER_BYTES], key, block):
                return found
        return len(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            try:
                if not self._client.exists(_PREFIX + key):
                    self._client.set(_PREFIX + key, pack_header(key, block) + bytes(block))
            except redis.RedisError as error:
                raise StorageError(str(error)) from error

    def clear(self) -> None:
        try:
            for key in self._client.scan_iter(match=_PREFIX + b"*", count=_CLEAR_BATCH):
                self._client.unlink(key)
        except redis.RedisError as error:
            raise StorageError(str(error)) from error

    def close(self) -> None:
        self._client.close()


def make(capacity: int, config: Mapping[str, Any]) -> RedisStorage:
    """`url` of the server, `timeout_s` for each answer; the capacity is the server's own matter."""
    check_config("redis", config, {"url": str, "timeout_s": float})
    return RedisStorage(config.get("url", "redis://127.0.0.1:6379/0"), config.get("timeout_s", 1.0))
