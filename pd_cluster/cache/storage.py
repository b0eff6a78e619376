"""The tier below a worker's memory: blocks of KV under keys that say what they are.

A key is the chained hash of all tokens up to the block's end (`cache/block_hash.py`), begun with a
hash of what the KV depends on beside the tokens: model, layout and block size (`storage_root`). So
stores can be shared by workers and outlive them, and a block of anything else is never found.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from typing import Any
from zlib import crc32

from pd_cluster.cache.block_hash import namespace_hash

_HEADER = struct.Struct("<8s32sQI")
_MAGIC = b"pdkv\x00\x00\x00\x01"
HEADER_BYTES = _HEADER.size


class StorageError(Exception):
    """The store cannot be reached or refuses; what was asked for counts as missing."""


class StorageBackend(ABC):
    """Blocks by key (32 bytes). May block; each worker calls it from two threads, a reader's and a
    writer's. A block that is missing, torn or another's is a miss, never an error.

    All raise StorageError where the store fails as a whole.
    """

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, up to the first that is not: a hint."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill `blocks` (writable bytes) with what is stored, up to the first miss: how many."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Store blocks; those that are there already may be left as they are."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks of every worker that shares the store."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and files. Nothing is called afterwards."""


def storage_root(signature: Mapping[str, str], block_size: int, namespace: str | None) -> bytes:
    """What the first block of a namespace is chained to, for what `signature` says of the KV."""
    text = "\n".join(f"{key}={signature[key]}" for key in sorted(signature))
    named = namespace_hash(namespace)
    return sha256(f"block={block_size}\n{text}\n".encode() + named).digest()


def pack_header(key: bytes, block: memoryview) -> bytes:
    """What precedes a block in a store that may lose or tear what it was given."""
    return _HEADER.pack(_MAGIC, key, block.nbytes, crc32(block))


def header_fits(header: bytes, key: bytes, block: memoryview) -> bool:
    """Whether `block` is whole and what was stored under `key`."""
    return len(header) == HEADER_BYTES and header == pack_header(key, block)


# A factory takes the capacity in bytes and the backend's own configuration.
StorageFactory = Callable[[int, Mapping[str, Any]], StorageBackend]

_FACTORIES: dict[str, str | StorageFactory] = {
    "file": "pd_cluster.cache.storage_file:make",
    "redis": "pd_cluster.cache.storage_redis:make",
}


def register_storage_backend(name: str, factory: StorageFactory) -> None:
    """Make a backend known under a name that `hicache_storage_backend` may then have.

    Raises:
        ValueError: the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"a storage backend {name!r} is registered already")
    _FACTORIES[name] = factory


def make_storage_backend(name: str, capacity: int, config: Mapping[str, Any]) -> StorageBackend:
    """The backend of that name; `module:factory` names one of anybody's.

    Raises:
        ValueError: there is no such backend, or its configuration is wrong; the message says what
            is allowed.
        StorageError: the store cannot be reached.
    """
    factory = _FACTORIES.get(name, name)
    if isinstance(factory, str):
        module, colon, attribute = factory.partition(":")
        if not colon:
            known = ", ".join(_FACTORIES)
            raise ValueError(f"unknown storage backend {name!r}; known: {known}, module:factory")
        try:
            factory = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"storage backend {name!r}: {error}") from error
    made: StorageBackend = factory(capacity, config)
    return made


def check_config(name: str, config: Mapping[str, Any], allowed: Mapping[str, type]) -> None:
    """Raises ValueError naming a key that the backend does not have, or whose type is wrong."""
    for key, value in config.items():
        if key not in allowed:
            raise ValueError(
                f"storage backend {name!r} has no key {key!r}; allowed: {', '.join(allowed)}"
            )
        if not isinstance(value, allowed[key]):
            raise ValueError(
                f"{key} of storage backend {name!r} must be of type {allowed[key].__name__},"
                f" not {value!r}"
            )
