"""How late the coordinator hears of a cache."""

from __future__ import annotations

import numpy as np

from pd_cluster.cache.events import PagesRemoved
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.coordinator.costs import LinkMeasured, TierMeasured
from pd_cluster.coordinator.wire import decode_update
from pd_cluster.types import WorkerId
from pd_cluster.worker.kv_feed import MAX_UNCONFIRMED, KvFeed
from tests.cache.tiered import Tiers

CHANGE = [PagesRemoved(np.zeros(1, np.int32))]


def make_feed() -> tuple[KvFeed, list[bytes]]:
    sent: list[bytes] = []
    cache = PrefixCache(PagePool(4), 1, make_eviction_policy("lru", {}))
    return KvFeed(WorkerId("decode-0", "a"), cache, sent.append), sent


def test_the_lag_is_the_age_of_the_oldest_change_that_is_not_confirmed():
    feed, sent = make_feed()
    assert feed.lag_s(5.0) == 0.0
    feed.take(CHANGE, 10.0)
    feed.take(CHANGE, 10.5)
    assert feed.lag_s(11.0) == 1.0
    feed.flush(11.0)
    first = feed.updates
    feed.take(CHANGE, 12.0)
    feed.flush(12.5)
    assert len(sent) == 2
    feed.confirmed(first)
    assert feed.lag_s(13.0) == 1.0
    feed.confirmed(feed.updates)
    assert feed.lag_s(99.0) == 0.0


def test_a_snapshot_confirms_all_that_was_lost_and_an_outage_takes_no_memory():
    feed, _ = make_feed()
    for second in range(2 * MAX_UNCONFIRMED):
        feed.take(CHANGE, float(second))
        feed.flush(float(second))
    assert feed.lag_s(5000.0) == 5000.0
    assert len(feed._unconfirmed) == MAX_UNCONFIRMED
    feed.refused(feed.updates)
    feed.confirmed(feed.updates)
    assert feed.lag_s(5000.0) == 0.0


def test_updates_that_were_refused_together_give_one_snapshot():
    feed, sent = make_feed()
    for second in range(3):
        feed.take(CHANGE, float(second))
        feed.flush(float(second))
    for number in (1, 2, 3):
        feed.refused(number)
    snapshots = [decode_update(data)[0].snapshot for data in sent]
    assert snapshots == [False, False, False, True]
    feed.take(CHANGE, 9.0)
    feed.flush(9.0)
    feed.refused(feed.updates)  # what came after it is missing something again
    assert decode_update(sent[-1])[0].snapshot
    assert len(sent) == 6


def test_reads_from_lower_tiers_and_writes_to_peers_are_told():
    sent: list[bytes] = []
    tiers = Tiers(device=16, host=32, record_events=True)
    feed = KvFeed(WorkerId("decode-0", "a"), tiers.cache, sent.append)
    prompts = [np.arange(start, start + 12, dtype=np.int32) for start in (0, 100)]
    for prompt in (*prompts, prompts[0]):  # of which eight pages had to go
        tiers.run(prompt)
        tiers.drain()
    feed.take(tiers.cache.take_events(), 0.0)
    feed.written([(WorkerId("decode-1", "b"), 3, 0.5)])
    feed.flush(0.0)
    update, measured = decode_update(sent[0])
    assert {getattr(event, "tier", None) for event in update.events} == {"device", "host"}
    link = LinkMeasured(WorkerId("decode-1", "b"), 3, 0.5)
    assert measured == [TierMeasured("host", 8, 1.0), link]
