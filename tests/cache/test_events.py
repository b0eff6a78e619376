"""KV events: what a subscriber rebuilds from them is what the cache holds, at any page size."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from pd_cluster.cache.block_hash import prefix_hashes
from pd_cluster.cache.block_log import BlockLog, EventStream
from pd_cluster.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    KvEvent,
    KvEventBatch,
    decode_batch,
    decode_events,
    decode_page_events,
    encode_batch,
    encode_events,
    encode_page_events,
)
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.errors import WireError


def make_cache(num_pages: int, page_size: int) -> PrefixCache:
    policy = make_eviction_policy("lru", {})
    return PrefixCache(PagePool(num_pages), page_size, policy, record_events=True)


def run(cache: PrefixCache, tokens: Tokens, now: float, namespace: str | None = None) -> None:
    match = cache.match(tokens, namespace, now=now, count_hit=True)
    cache.lock(match.node)
    own = cache.allocate(-(-tokens.size // cache.page_size) - match.pages.size, now)
    table = np.concatenate([match.pages, own])
    cache.finish(tokens, table, match.node, namespace, now=now)


def log_of(cache: PrefixCache, block: int, medium: str = "GPU") -> BlockLog:
    return BlockLog(cache.pool.num_pages, cache.page_size, block, medium)


def carried(events: list[CacheEvent]) -> list[CacheEvent]:
    """As they arrive in another process."""
    return decode_page_events(encode_page_events(events))


class Subscriber:
    """What a router keeps: the names of blocks, each with its parent."""

    def __init__(self) -> None:
        self.held: dict[int, int | None] = {}

    def apply(self, events: list[KvEvent]) -> None:
        for event in decode_events(encode_events(events)):
            match event:
                case BlockStored():
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    parent = event.parent_block_hash
                    for block in event.block_hashes:
                        assert parent is None or parent in self.held, "stored after nothing"
                        assert block not in self.held, "stored twice"
                        self.held[block] = parent
                        parent = block
                case BlockRemoved(block_hashes):
                    for block in block_hashes:
                        del self.held[block]
                case AllBlocksCleared():
                    self.held.clear()


def held(cache: PrefixCache, block: int) -> set[int]:
    """The names of all blocks of all prefixes in the tree."""
    names: set[int] = set()
    for node in cache.tree.nodes():
        if node.children:
            continue
        up, parts = node, []
        while up.parent is not None:
            parts.append(up.tokens)
            up = up.parent
        tokens = np.concatenate(parts[::-1])
        names.update(prefix_hashes(tokens, cache.tree.namespace(node), block))
    return names


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("block", [4, 16, 64])
def test_a_subscriber_holds_what_the_cache_holds(page_size: int, block: int) -> None:
    rng = random.Random(page_size * 100 + block)
    cache = make_cache(960 // page_size, page_size)
    stream, subscriber = EventStream([log_of(cache, block)]), Subscriber()
    seq = 0
    for now in range(300):
        kind = rng.randrange(12)
        if kind == 0:
            cache.reset()
        else:
            # Few distinct tokens in runs, so that prompts share and split at any place.
            tokens = np.repeat([rng.randrange(2) for _ in range(40)], rng.choice([1, 3, 16]))
            tokens = tokens[: rng.randrange(1, tokens.size)].astype(np.int32)
            run(cache, tokens, float(now), rng.choice([None, None, "tenant"]))
        first, events = stream.apply("GPU", carried(cache.take_events()))
        assert first == seq
        seq += len(events)
        subscriber.apply(events)
        assert set(subscriber.held) == held(cache, block)
        late = Subscriber()
        number, snapshot = stream.snapshot()
        late.apply(snapshot)
        assert (number, late.held) == (seq, subscriber.held)
    assert seq > 50


def test_a_snapshot_clears_what_the_receiver_believed() -> None:
    cache = make_cache(64, 1)
    stream, subscriber = EventStream([log_of(cache, 4)]), Subscriber()
    run(cache, np.arange(8, dtype=np.int32), 0.0)
    subscriber.held = {99: None}
    stream.apply("GPU", carried(cache.take_events()))
    subscriber.apply(stream.snapshot()[1])
    assert set(subscriber.held) == set(prefix_hashes(np.arange(8, dtype=np.int32), None, 4))


def test_names_are_chained_and_their_own_in_each_namespace() -> None:
    tokens = np.arange(12, dtype=np.int32)
    names = prefix_hashes(tokens, None, 4)
    assert prefix_hashes(tokens[:9], None, 4) == names[:2]
    other = tokens.copy()
    other[0] += 1
    assert not set(prefix_hashes(other, None, 4)) & set(names)
    assert not set(prefix_hashes(tokens, "", 4)) & set(names)
    assert not set(prefix_hashes(tokens, "a", 4)) & set(prefix_hashes(tokens, "b", 4))


def test_what_is_published_reads_as_vllms_events_do() -> None:
    """Arrays by position, with the type's name first: of a batch ts and events."""
    cache = make_cache(64, 1)
    stream = EventStream([log_of(cache, 4)])
    run(cache, np.arange(9, dtype=np.int32), 0.0)
    run(cache, np.arange(4, dtype=np.int32), 1.0, "salt")
    cache.evict(1, 2.0)
    cache.reset()
    events = stream.apply("GPU", carried(cache.take_events()))[1]
    raw = msgspec.msgpack.decode(encode_batch(KvEventBatch(1.5, events)))
    names = prefix_hashes(np.arange(8, dtype=np.int32), None, 4)
    salted = prefix_hashes(np.arange(4, dtype=np.int32), "salt", 4)
    assert raw == [
        1.5,
        [
            ["BlockStored", names, None, list(range(8)), 4, None, "GPU", None, None],
            ["BlockStored", salted, None, [0, 1, 2, 3], 4, None, "GPU", None, [["salt"]]],
            ["BlockRemoved", names, "GPU"],
            ["AllBlocksCleared"],
        ],
        None,
    ]
    assert decode_batch(encode_batch(KvEventBatch(1.5, events))).events == events


def test_a_block_is_chained_to_the_block_above_it() -> None:
    cache = make_cache(64, 1)
    stream = EventStream([log_of(cache, 4)])
    tokens = np.arange(14, dtype=np.int32)
    run(cache, tokens[:6], 0.0)
    run(cache, tokens, 1.0)
    first, second = stream.apply("GPU", carried(cache.take_events()))[1]
    names = prefix_hashes(tokens, None, 4)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.block_hashes) == (None, names[:1])
    assert (second.parent_block_hash, second.block_hashes) == (names[0], names[1:])
    assert second.token_ids == list(range(4, 12)), "with the tokens that lie in the node above"


def test_clearing_one_medium_leaves_the_others() -> None:
    device, host = make_cache(64, 1), make_cache(64, 1)
    stream = EventStream([log_of(device, 4), log_of(host, 4, "CPU")])
    subscriber = Subscriber()
    run(host, np.arange(8, dtype=np.int32), 0.0)
    run(device, np.arange(100, 108, dtype=np.int32), 0.0)
    subscriber.apply(stream.apply("GPU", device.take_events())[1])
    subscriber.apply(stream.apply("CPU", host.take_events())[1])
    device.reset()
    subscriber.apply(stream.apply("GPU", device.take_events())[1])
    assert set(subscriber.held) == held(host, 4)


def test_blocks_that_do_not_fit_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 6 tokens do not fit pages of 4"):
        BlockLog(8, 4, 6)


def test_garbage_is_no_event() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode([["BlockRemoved"]])):
        with pytest.raises(WireError):
            decode_events(data)
        with pytest.raises(WireError):
            decode_batch(data)
        with pytest.raises(WireError):
            decode_page_events(data)
