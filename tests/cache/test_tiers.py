"""Tiers, one behaviour at a time."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import OutOfPages
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.registry import prefix_cache_factory, register_prefix_cache
from pd_cluster.cache.tier_ops import CopyIn, CopyOut, FetchBlocks, ProbeBlocks, StoreBlocks
from pd_cluster.cache.tier_policy import Rate, prefetch_deadline, worth_loading
from tests.cache.tiered import Prefix, Tiers

WRITE = ["write_through", "write_back", "write_through_selective"]


def ids(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def on_host(tiers: Tiers, text: str, namespace: str | None = None) -> int:
    return tiers.cache.host.match(ids(text), namespace, now=0.0, count_hit=False).length


def on_device(tiers: Tiers, text: str) -> int:
    return tiers.cache.match(ids(text), now=0.0, count_hit=False).length


def done(tiers: Tiers, kind: type) -> int:
    return sum(isinstance(op, kind) for op in tiers.done)


def hits(cache: PrefixCache) -> dict[str, int]:
    """The hits of every prefix, by its text."""
    found: dict[str, int] = {}
    for node in cache.tree.nodes():
        above, up = "", node.parent
        while up is not None:
            above = bytes(up.tokens.tolist()).decode() + above
            up = up.parent
        text = bytes(node.tokens.tolist()).decode()
        found |= {above + text[:end]: node.hit_count for end in range(1, len(text) + 1)}
    return found


def test_write_through_copies_what_is_published_and_only_once() -> None:
    tiers = Tiers(write_policy="write_through")
    tiers.run(ids("ABCD"))
    assert on_host(tiers, "ABCD") == 0
    assert tiers.cache.counts().in_flight == 4, "being read by the copy: not to be reused"
    tiers.drain()
    assert on_host(tiers, "ABCD") == 4
    tiers.run(ids("ABCD"))
    tiers.run(ids("ABXY"))
    tiers.drain()
    assert [op.device.size for op in tiers.done if isinstance(op, CopyOut)] == [4, 2]
    tiers.at_rest()


def test_chunks_that_follow_each_other_are_each_copied_once() -> None:
    """The second is published before the first has arrived."""
    tiers = Tiers(write_policy="write_through")
    _, node, table = tiers.claim(ids("ABCDEF"))
    for end in (2, 4, 6):
        published = tiers.cache.publish(ids("ABCDEF"[:end]), table, now=tiers.now)
        tiers.cache.move_lock(node, published.node)
        node, table = published.node, published.pages
        tiers.take()
    assert [op.device.size for op in tiers.copying if isinstance(op, CopyOut)] == [2, 2, 2]
    tiers.cache.finish(ids("ABCDEF"), table, node, now=tiers.now)
    tiers.at_rest()
    assert on_host(tiers, "ABCDEF") == 6


def test_where_the_first_part_is_lost_the_next_is_not_kept() -> None:
    tiers = Tiers(write_policy="write_through")
    _, node, table = tiers.claim(ids("ABCD"))
    published = tiers.cache.publish(ids("AB"), table, now=tiers.now)
    tiers.cache.move_lock(node, published.node)
    tiers.take()
    tiers.cache.finish(ids("ABCD"), published.pages, published.node, now=tiers.now)
    tiers.take()
    tiers.step(error="broken")
    tiers.at_rest()
    assert on_host(tiers, "ABCD") == 0
    assert tiers.cache.host.counts().free == 32
    assert tiers.cache.tier_statistics().errors == 1


def test_write_back_copies_at_eviction_with_all_above_it_and_before_reuse() -> None:
    tiers = Tiers(device=6, write_policy="write_back")
    tiers.run(ids("ABCD"))
    tiers.run(ids("ABXY"))
    assert not tiers.done, "nothing before it is evicted"
    tiers.run(ids("Q"))
    (copied,) = [op for op in tiers.done if isinstance(op, CopyOut)]
    assert copied.now
    assert copied.device.size == 4, "AB, which is still on the device, and CD"
    assert on_host(tiers, "ABCD") == 4
    assert on_device(tiers, "ABCD") == 2
    tiers.at_rest()


def test_selective_waits_for_the_second_use() -> None:
    tiers = Tiers(write_policy="write_through_selective")
    tiers.run(ids("ABCD"))
    tiers.drain()
    assert on_host(tiers, "ABCD") == 0
    tiers.run(ids("ABEF"))
    tiers.drain()
    assert (on_host(tiers, "ABCD"), on_host(tiers, "ABEF")) == (2, 2)


@pytest.mark.parametrize("write", WRITE)
def test_what_was_evicted_comes_back(write: str) -> None:
    tiers = Tiers(device=8, write_policy=write)
    tiers.run(ids("ABCD"))
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.run(ids("PQRSTUVW"))
    assert on_device(tiers, "ABCD") == 0
    tiers.drain()
    assert tiers.run(ids("ABCDE")) == (0, 4, 0)
    assert tiers.cache.tier_statistics().host_loaded == 4
    tiers.at_rest()


@pytest.mark.parametrize("write", WRITE)
def test_hits_are_those_of_a_cache_that_never_had_to_evict(write: str) -> None:
    """By every write policy, wherever a prefix was when it was hit; if it is still somewhere."""
    small = Tiers(device=12, host=200, policy="lfu", write_policy=write)
    large = Tiers(device=200, host=200, policy="lfu", write_policy=write)
    asked = ["ABCD", "ABCD", "PQRSTU", "ABCD", "WXYZVW", "ABCDEF", "PQRSTU", "ABCD", "WXYZVW"] * 2
    for text in asked:
        for tiers in (small, large):
            tiers.run(ids(text))
            tiers.drain()
    expected, found, below = hits(large.cache), hits(small.cache), hits(small.cache.host)
    assert found
    if write == "write_through_selective":
        # What was used only once is forgotten, and begins anew.
        assert below["ABCD"] == expected["ABCD"] == 9
        assert all(count <= expected[prefix] for prefix, count in found.items())
    else:
        assert {**below, **found} == {**found, **below} == expected
        assert done(small, CopyIn) > 2


def test_a_load_holds_its_pages_until_the_request_has_claimed_them() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(8, tiers.now)
    promotion = tiers.promote(ids("ABCDE"))
    assert promotion is not None
    assert not tiers.ready(promotion)
    assert tiers.cache.counts().in_flight == 4
    assert not tiers.ready(promotion), "asking again starts nothing"
    tiers.drain()
    assert tiers.ready(promotion)
    assert tiers.cache.counts().protected == 4
    with pytest.raises(OutOfPages):
        tiers.claim(ids("PQRST"))
    tiers.cache.settle(promotion)
    assert tiers.cache.counts().protected == 0
    tiers.at_rest()


def test_a_request_that_gives_up_leaves_what_was_loaded_to_others() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(8, tiers.now)
    promotion = tiers.promote(ids("ABCDE"))
    assert promotion is not None
    tiers.ready(promotion)
    tiers.cache.settle(promotion)
    tiers.at_rest()
    assert tiers.run(ids("ABCDE")) == (4, 0, 0)


def test_two_requests_for_one_prefix_load_it_once() -> None:
    tiers = Tiers(device=12)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(12, tiers.now)
    one, other = tiers.promote(ids("ABCDE")), tiers.promote(ids("ABCDF"))
    assert one is not None
    assert other is not None
    assert not tiers.ready(one)
    assert not tiers.ready(other)
    tiers.drain()
    assert tiers.ready(one)
    assert tiers.ready(other)
    assert done(tiers, CopyIn) == 1
    for promotion in (one, other):
        tiers.cache.settle(promotion)
    tiers.at_rest()


def test_a_failed_load_is_computed_instead() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(8, tiers.now)
    promotion = tiers.promote(ids("ABCD"))
    assert promotion is not None
    tiers.ready(promotion)
    tiers.step(error="broken")
    assert tiers.ready(promotion)
    assert promotion.host_tokens == 0
    assert tiers.claim(ids("ABCD"))[0] == 0


def test_what_computes_faster_than_it_loads_is_computed() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(8, tiers.now)
    tiers.cache.load_rate.observe(100, 1.0)
    tiers.cache.compute_rate.observe(200, 1.0)
    assert tiers.run(ids("ABCD")) == (0, 0, 0)
    assert done(tiers, CopyIn) == 0


def test_without_room_for_a_load_the_request_may_go_on() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.drain()
    tiers.cache.evict(8, tiers.now)
    _, node, table = tiers.claim(ids("PQRST"))
    promotion = tiers.promote(ids("ABCD"))
    assert promotion is not None
    assert tiers.ready(promotion)
    assert tiers.cache.counts().in_flight == 0
    tiers.finish(ids("PQRST"), node, table)
    assert not tiers.ready(promotion), "now there is room"
    tiers.drain()
    tiers.cache.settle(promotion)
    tiers.at_rest()


def test_the_host_tier_evicts_what_was_longest_unused() -> None:
    tiers = Tiers(device=8, host=8)
    for text in ("ABCD", "EFGH", "ABCD", "IJKL"):
        tiers.run(ids(text))
        tiers.drain()
    assert [on_host(tiers, text) for text in ("ABCD", "EFGH", "IJKL")] == [4, 0, 4]


def test_what_is_too_large_for_the_host_is_kept_in_part() -> None:
    tiers = Tiers(device=16, host=6)
    tiers.run(ids("ABCDEFGH"))
    tiers.at_rest()
    assert on_host(tiers, "ABCDEFGH") == 6
    assert tiers.cache.tier_statistics().backups_skipped == 2


def test_copies_leave_half_of_the_pool_to_those_who_wait() -> None:
    tiers = Tiers(device=8)
    tiers.run(ids("ABCD"))
    tiers.run(ids("EFG"))
    assert tiers.cache.tier_statistics().backups_skipped == 3
    assert tiers.cache.counts().in_flight == 4
    tiers.drain()
    tiers.run(ids("EFG"))
    tiers.at_rest()
    assert on_host(tiers, "EFG") == 3, "made good at the next use"
    tiers.run(ids("PQRSTU"))
    tiers.at_rest()
    assert on_host(tiers, "PQRSTU") == 4, "in part, where it is more than half"


def test_namespaces_never_share_on_any_tier() -> None:
    storage: dict[Prefix, list[object]] = {}
    tiers = Tiers(device=8, storage=storage, prefetch_policy="wait_complete")
    tiers.run(ids("ABCD"), "a")
    tiers.drain()
    tiers.cache.reset()
    assert tiers.run(ids("ABCD"), "b") == (0, 0, 0)
    assert tiers.run(ids("ABCD"), None) == (0, 0, 0)
    assert tiers.run(ids("ABCD"), "a") == (0, 0, 4)


def test_storage_has_whole_blocks_each_written_once() -> None:
    storage: dict[Prefix, list[object]] = {}
    tiers = Tiers(storage=storage, block=4)
    tiers.run(ids("ABCDEF"))
    tiers.drain()
    tiers.run(ids("ABCDEFGHI"))
    tiers.drain()
    assert sorted(len(values) for _, values in storage) == [4, 8]
    starts = [(op.start, op.tokens.size) for op in tiers.done if isinstance(op, StoreBlocks)]
    assert starts == [(0, 4), (4, 8)]
    tiers.at_rest()


def restarted(storage: dict[Prefix, list[object]], policy: str) -> Tiers:
    """A second life, with what the first one stored: 8 tokens of ABCDEFGHIJ, in blocks of 4."""
    first = Tiers(device=20, storage=storage, block=4)
    first.run(ids("ABCDEFGHIJ"))
    first.drain()
    return Tiers(storage=storage, block=4, prefetch_policy=policy)


def test_wait_complete_waits_for_all_that_is_stored() -> None:
    tiers = restarted({}, "wait_complete")
    tiers.now = 1e9
    promotion = tiers.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    promotion.deadline = 0.0
    assert not tiers.ready(promotion)
    assert tiers.run(ids("ABCDEFGHIJ")) == (0, 0, 8)
    assert tiers.ready(promotion)
    tiers.cache.settle(promotion)
    tiers.at_rest()


def test_best_effort_waits_for_nothing_and_takes_what_is_there() -> None:
    tiers = restarted({}, "best_effort")
    promotion = tiers.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    tiers.step()  # the probe
    assert isinstance(tiers.storing[0], FetchBlocks)
    assert tiers.ready(promotion)
    tiers.cache.settle(promotion)
    assert tiers.claim(ids("ABCDEFGHIJ"))[0] == 0
    # Queued, and so with time: what has been read until its turn comes is used.
    later = restarted({}, "best_effort")
    promotion = later.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    while later.step():
        pass
    assert not later.ready(promotion), "the load, which is worth it"
    later.drain()
    assert later.ready(promotion)
    assert (promotion.storage_tokens, promotion.host_tokens) == (8, 0)


def test_timeout_waits_until_its_deadline() -> None:
    tiers = restarted({}, "timeout")
    promotion = tiers.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    assert promotion.deadline == prefetch_deadline(10, 0.0) == pytest.approx(1.0024, abs=1e-4)
    tiers.now = promotion.deadline - 0.001
    assert not tiers.ready(promotion)
    tiers.now = promotion.deadline
    assert tiers.ready(promotion), "storage that does not answer holds up nobody"
    tiers.cache.settle(promotion)
    tiers.at_rest()


def test_a_fetch_that_was_stopped_keeps_the_blocks_that_it_had_read() -> None:
    tiers = restarted({}, "timeout")
    promotion = tiers.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    tiers.step()
    tiers.now = promotion.deadline
    assert tiers.ready(promotion)
    tiers.cache.settle(promotion)
    tiers.at_rest()
    assert on_host(tiers, "ABCDEFGHIJ") == 4


def test_storage_that_fails_is_a_miss() -> None:
    for steps in (0, 1):
        tiers = restarted({}, "wait_complete")
        promotion = tiers.promote(ids("ABCDEFGHIJ"))
        assert promotion is not None
        for _ in range(steps):
            tiers.step()
        tiers.step(error="no such host")
        assert tiers.ready(promotion)
        tiers.cache.settle(promotion)
        assert tiers.claim(ids("ABCDEFGHIJ"))[0] == 0


def test_a_block_that_vanished_ends_what_is_fetched() -> None:
    storage: dict[Prefix, list[object]] = {}
    tiers = restarted(storage, "wait_complete")
    promotion = tiers.promote(ids("ABCDEFGHIJ"))
    assert promotion is not None
    tiers.step()
    del storage[None, tuple(ids("ABCDEFGH").tolist())]
    while not tiers.ready(promotion):
        tiers.step()
    assert promotion.storage_tokens == 4
    tiers.cache.settle(promotion)
    tiers.at_rest()


def test_nothing_is_asked_of_storage_for_what_is_on_the_device() -> None:
    tiers = Tiers(storage={}, block=4)
    tiers.run(ids("ABCDEFGH"))
    tiers.drain()
    asked = done(tiers, ProbeBlocks)
    assert tiers.run(ids("ABCDEFGHI")) == (8, 0, 0)
    assert done(tiers, ProbeBlocks) == asked


def test_a_flush_empties_device_and_host_but_not_storage() -> None:
    storage: dict[Prefix, list[object]] = {}
    tiers = Tiers(storage=storage, block=4)
    tiers.run(ids("ABCDEFGH"))
    tiers.drain()
    tiers.cache.reset()
    assert (on_device(tiers, "ABCDEFGH"), on_host(tiers, "ABCDEFGH")) == (0, 0)
    assert len(storage) == 2
    tiers.at_rest()


def test_disabled_it_keeps_nothing_anywhere() -> None:
    tiers = Tiers(enabled=False, storage={})
    assert tiers.run(ids("ABCD")) == tiers.run(ids("ABCD")) == (0, 0, 0)
    assert not tiers.done
    tiers.at_rest()


def test_the_decision_to_load() -> None:
    assert worth_loading(10, None, 100.0)
    assert worth_loading(10, 100.0, None)
    assert worth_loading(10, 101.0, 100.0)
    assert not worth_loading(10, 99.0, 100.0)


def test_rates_follow_what_is_measured() -> None:
    rate = Rate()
    assert rate.per_s is None
    rate.observe(0, 1.0)
    rate.observe(10, 0.0)
    assert rate.per_s is None
    rate.observe(100, 1.0)
    assert rate.per_s == 100.0
    rate.observe(1_000_000, 1.0)
    assert rate.per_s < 130.0, "one lucky measurement says little"
    for _ in range(100):
        rate.observe(10, 1.0)
    assert rate.per_s == pytest.approx(10.0)


def test_other_caches_can_be_registered() -> None:
    class Own(PrefixCache):
        pass

    assert prefix_cache_factory("radix") is PrefixCache
    name = "of this test"
    with pytest.raises(ValueError, match="unknown prefix cache 'of this test'; registered: radix"):
        prefix_cache_factory(name)
    register_prefix_cache(name, Own)
    assert prefix_cache_factory(name) is Own
    with pytest.raises(ValueError, match="registered already"):
        register_prefix_cache(name, PrefixCache)
    with pytest.raises(ValueError, match="no_such_module"):
        prefix_cache_factory("no_such_module:own")
    assert prefix_cache_factory(f"pd_cluster.cache.registry:{name}") is Own
