"""What the prefix cache costs on the path of a request, against yardsticks of the same run.

The aims: a match at most twice a comparison and a copy of the same arrays (the least that it can
be), evicting one node at most ten times a pop and a push of a plain heap of that size, and at most
doubling between 50,000 and 300,000 leaves.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache

_VOCABULARY = 49152
_MATCH_LENGTHS = (1024, 8192, 32768, 131072)
_LEAF_COUNTS = (1_000, 50_000, 300_000)
_EVICTIONS = 500


def run() -> dict[str, float]:
    """Figures by dotted name: medians in microseconds, memory in bytes; page size 1, LRU."""
    figures: dict[str, float] = {}
    for length in _MATCH_LENGTHS:
        figures |= _match(length)
    figures |= _turns()
    for count in _LEAF_COUNTS:
        figures |= _evict(count)
    figures |= _memory()
    return figures


def _cache(num_pages: int) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), 1, make_eviction_policy("lru", {}))


def _tokens(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, _VOCABULARY, length).astype(np.int32)


def _publish(cache: PrefixCache, tokens: Tokens, now: float) -> None:
    match = cache.match(tokens, now=now, count_hit=True)
    cache.lock(match.node)
    own = cache.allocate(tokens.size - match.length, now)
    cache.finish(tokens, np.concatenate([match.pages, own]), match.node, now=now)


def _median_us(call: Callable[[], object], repeats: int = 101) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return sorted(times)[repeats // 2] / 1000


def _match(length: int) -> dict[str, float]:
    """A prompt that is cached whole, as one edge; a lock is measured with its unlock."""
    cache = _cache(length)
    tokens = _tokens(length)
    _publish(cache, tokens, 0.0)
    other = tokens.copy()
    node = cache.match(other, now=0.0, count_hit=False).node
    indices = np.arange(length, dtype=np.int32)

    def lock_and_unlock() -> None:
        cache.lock(node)
        cache.unlock(node)

    match = _median_us(lambda: cache.match(other, now=1.0, count_hit=True))
    yardstick = _median_us(lambda: (np.array_equal(tokens, other), indices.copy()))
    return {
        f"cache.match.{length}_us": match,
        f"cache.match.{length}_yardstick_us": yardstick,
        f"cache.match.{length}_ratio": match / yardstick,
        f"cache.lock.{length}_us": _median_us(lock_and_unlock),
    }


def _turns() -> dict[str, float]:
    """A conversation of 32 turns of 256 tokens: a path of 32 nodes; and what a split costs."""
    cache = _cache(1 << 20)
    tokens = _tokens(8192)
    for end in range(256, 8193, 256):
        _publish(cache, tokens[:end], float(end))
    match = _median_us(lambda: cache.match(tokens, now=1e6, count_hit=True))
    # Each peek splits an edge of 8,192 tokens a little further to the front.
    whole = _tokens(8192, seed=1)
    _publish(cache, whole, 1e6)
    ends = iter(range(8191, 8000, -1))
    split = _median_us(lambda: cache.match(whole[: next(ends)], now=1e6, count_hit=False))
    fresh = iter([_tokens(1024, seed) for seed in range(2, 110)])
    publish = _median_us(lambda: _publish(cache, next(fresh), 1e6))
    return {
        "cache.match.32_turns_us": match,
        "cache.split.8192_us": split,
        "cache.publish.1024_us": publish,
    }


def _evict(count: int) -> dict[str, float]:
    """One of `count` leaves of a page each, last used in random order, is evicted."""
    cache = _cache(count)
    rng = random.Random(0)
    order = list(range(count))
    for leaf in order:
        _publish(cache, np.array([leaf], np.int32), 0.0)
    rng.shuffle(order)
    for now, leaf in enumerate(order):
        cache.match(np.array([leaf], np.int32), now=float(now), count_hit=True)
    heap = [(0.0, rng.random(), i, i, cache) for i in range(count)]
    heapq.heapify(heap)
    new = iter([(0.0, 1 + rng.random(), i, i, cache) for i in range(count, count + _EVICTIONS)])

    def pop_and_push() -> None:
        heapq.heappop(heap)
        heapq.heappush(heap, next(new))

    # A collection in the middle would be measured as part of whatever triggers it.
    gc.collect()
    gc.disable()
    try:
        evict = _median_us(lambda: cache.evict(1, 1e9), _EVICTIONS)
        yardstick = _median_us(pop_and_push, _EVICTIONS)
    finally:
        gc.enable()
    return {
        f"cache.evict.{count}_us": evict,
        f"cache.evict.{count}_heapq_us": yardstick,
        f"cache.evict.{count}_ratio": evict / yardstick,
    }


def _memory() -> dict[str, float]:
    """Memory for each cached leaf of 100 tokens, the 800 bytes of its data included."""
    count = 2000
    cache = _cache(count * 100)
    prompts = [_tokens(100, seed) for seed in range(count)]
    tracemalloc.start()
    try:
        for now, prompt in enumerate(prompts):
            _publish(cache, prompt, float(now))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {"cache.leaf_of_100_tokens_bytes": used / count}
