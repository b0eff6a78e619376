"""Names of prefixes: hashes of blocks of tokens, each chained to the block before it.

Equal hashes mean equal prefixes in one namespace, whatever the page size, the worker or the
process: KV events and storage name what they hold by them.
"""

from __future__ import annotations

from hashlib import sha256

from pd_cluster.cache.node import Tokens

BLOCK_TOKENS = 64


def namespace_hash(namespace: str | None) -> bytes:
    """What the first block of a namespace is chained to."""
    return b"" if namespace is None else sha256(b"namespace:" + namespace.encode()).digest()


def chain_hashes(tokens: Tokens, block_size: int, parent: bytes) -> list[bytes]:
    """SHA-256 of each whole block of `tokens` (int32) after the block or namespace `parent`."""
    data = memoryview(tokens.astype("<i4", copy=False).tobytes())
    step = block_size * 4
    hashes = []
    for at in range(0, len(data) - step + 1, step):
        parent = sha256(parent + data[at : at + step]).digest()
        hashes.append(parent)
    return hashes


def external_hash(digest: bytes) -> int:
    """A block's name in KV events: the first 64 bits, unsigned."""
    return int.from_bytes(digest[:8], "big")


def prefix_hashes(
    tokens: Tokens, namespace: str | None = None, block_size: int = BLOCK_TOKENS
) -> list[int]:
    """The names in KV events of all whole blocks of a prompt, from its start."""
    digests = chain_hashes(tokens, block_size, namespace_hash(namespace))
    return [external_hash(digest) for digest in digests]
