"""Prefixes by number: a 64-bit hash of every prefix of a token sequence, in one pass.

The hash of a prefix is the sum of one pseudo-random number for each (position, token) in it, so a
prefix is extended by adding, and all prefixes of an array are a cumulative sum. Two prefixes share
a hash by chance once in 2^64; the index is a hint, so even that would cost no more than a refusal.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pd_cluster.types import IntArray

Hashes = NDArray[np.uint64]

_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xD1B54A32D192ED03)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def prefix_hashes(
    tokens: IntArray, namespace: str | None = None, *, start: int = 0, parent: int | None = None
) -> Hashes:
    """The hash of the prefix that ends with each of `tokens`, uint64 [len(tokens)].

    `tokens` begin at position `start`, after the prefix whose hash is `parent` (None: at the top
    of `namespace`). The finaliser is that of splitmix64 (Steele et al., 2014).
    """
    base = namespace_hash(namespace) if parent is None else parent
    if not len(tokens):
        return np.empty(0, np.uint64)
    values = tokens.astype(np.uint64)
    positions = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    mixed = values * _TOKEN + positions * _POSITION
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    mixed[:1] += np.uint64(base)
    return np.cumsum(mixed, dtype=np.uint64)


def block_hashes(tokens: IntArray, block: int, namespace: str | None = None) -> Hashes:
    """The hashes of the prefixes of `block`, 2 x `block`, ... tokens."""
    return prefix_hashes(tokens, namespace)[block - 1 :: block]


def pack_hashes(hashes: Hashes) -> bytes:
    return hashes.astype("<u8").tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """ValueError if the length is no multiple of 8."""
    hashes: list[int] = np.frombuffer(data, "<u8").tolist()
    return hashes


def namespace_hash(namespace: str | None) -> int:
    """What the empty prefix of a namespace hashes to."""
    if namespace is None:
        return 0
    data = namespace.encode()
    return (crc32(data) << 32 | crc32(data[::-1] + b"#")) & 0xFFFFFFFFFFFFFFFF
