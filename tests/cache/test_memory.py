"""A full cache takes no more memory however many sequences pass through it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A process of its own: nothing else grows in it. Every sequence is new, of random length, shares a
# short prefix with some, and leaves by eviction; events, host tier and storage are on the way.
CODE = """
import gc, random, sys
import numpy as np
import psutil
from pd_cluster.cache.block_log import BlockLog, EventStream
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_ops import TierEvent
from pd_cluster.cache.tiers import TieredCache

total, tiers = int(sys.argv[1]), sys.argv[2] == "tiers"
make = lambda: make_eviction_policy("lfu", {})
host = PrefixCache(PagePool(6000), 1, make())
if tiers:
    cache = TieredCache(PagePool(3000), 1, make(), host=host, record_events=True, storage_block=16)
else:
    cache = PrefixCache(PagePool(3000), 1, make(), record_events=True)
stream = EventStream([BlockLog(3000, 1, 16)])
rng = np.random.default_rng(0)
process, start = psutil.Process(), 0

def copy(now):
    for op in cache.take_ops() if tiers else ():
        cache.tier_event(TierEvent(op.op, seconds=1.0), now)

for number in range(total):
    now = float(number)
    tokens = rng.integers(0, 2**31 - 1, 8 + number % 60, np.int32)
    tokens[0] = number % 50
    promotion = cache.promote(tokens, None, now=now) if tiers else None
    copy(now)
    while promotion and not cache.ready(promotion, now + 1e6):
        copy(now)
    match = cache.match(tokens, now=now, count_hit=True)
    cache.lock(match.node)
    table = np.concatenate([match.pages, cache.allocate(tokens.size - match.length, now)])
    if promotion:
        cache.settle(promotion)
    cache.finish(tokens, table, match.node, now=now)
    while tiers and not cache.idle:
        copy(now)
    stream.apply("GPU", cache.take_events())
    if number == total // 10:
        gc.collect()
        start = process.memory_info().rss
gc.collect()
cache.validate()
print(process.memory_info().rss / start - 1)
"""


def growth(sequences: int, kind: str) -> float:
    """How much the process grew after the first tenth, as a part of its size then."""
    command = [sys.executable, "-c", CODE, str(sequences), kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("kind", ["device", "tiers"])
def test_sequences_pass_through_without_a_trace(kind: str) -> None:
    assert growth(15_000, kind) < 0.01


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["device", "tiers"])
def test_a_million_sequences_pass_through_without_a_trace(kind: str) -> None:
    assert growth(1_000_000, kind) < 0.01
