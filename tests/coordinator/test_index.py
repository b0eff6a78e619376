"""The index against caches that really hold things, and against events that go missing."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from pd_cluster.cache.events import PagesCleared, PagesRemoved, PagesStored, StorageHolds
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import OutOfPages, PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tier_ops import WritePolicy
from pd_cluster.coordinator.holders import ExpectedTable, HolderTable, Stores
from pd_cluster.coordinator.index import KvUpdate, PrefixIndex
from pd_cluster.coordinator.prefix_hash import (
    block_hashes,
    pack_hashes,
    prefix_hashes,
    unpack_hashes,
)
from pd_cluster.types import IntArray, WorkerId
from tests.cache.tiered import Tiers

A, B, C = (WorkerId(f"prefill-{i}", "i0") for i in range(3))


def tokens(*values: int) -> IntArray:
    return np.array(values, np.int32)


def stored(values: IntArray, pages: list[int], parent: int | None = None) -> PagesStored:
    return PagesStored(None, parent, values, np.array(pages, np.int32))


def make_index(*workers: WorkerId, page_size: int = 1, block: int = 4) -> PrefixIndex:
    index = PrefixIndex(page_size, block)
    for slot, worker in enumerate(workers):
        index.join(worker, slot)
    return index


def match(index: PrefixIndex, values: IntArray, slots: int = 3, ns: str | None = None) -> list[int]:
    lengths: list[int] = index.match(block_hashes(values, index.block, ns).tolist(), slots).tolist()
    return lengths


def test_a_prefix_hash_continues_from_any_point() -> None:
    values = np.arange(100, dtype=np.int32)
    whole = prefix_hashes(values)
    for at in (0, 1, 63, 100):
        parent = int(whole[at - 1]) if at else None
        rest = prefix_hashes(values[at:], start=at, parent=parent)
        assert np.array_equal(rest, whole[at:])
    assert unpack_hashes(pack_hashes(whole)) == whole.tolist()


def test_prefix_hashes_differ_by_order_token_and_namespace() -> None:
    one = int(prefix_hashes(tokens(1, 2))[-1])
    others = [
        prefix_hashes(tokens(2, 1)),
        prefix_hashes(tokens(1, 3)),
        prefix_hashes(tokens(1, 2), "salt"),
        prefix_hashes(tokens(1, 2), "tlas"),
        prefix_hashes(tokens(0, 1, 2)),
    ]
    assert len({one, *(int(each[-1]) for each in others)}) == 6


def test_holders_are_a_set_however_they_are_kept() -> None:
    rng = random.Random(0)
    table, model = HolderTable(), {key: set[int]() for key in range(5)}
    for _ in range(5000):
        key, slot = rng.randrange(5), rng.choice([0, 1, 5, 70, 700])
        if rng.random() < 0.5:
            table.add(key, slot)
            model[key].add(slot)
        else:
            table.discard(key, slot)
            model[key].discard(slot)
        assert table.mask(key) == sum(1 << each for each in model[key])
    assert len(table) == sum(bool(slots) for slots in model.values())


def test_a_shared_chain_is_stored_once() -> None:
    index = make_index(A, B, C)
    for worker in (A, B, C):
        event = stored(np.arange(16, dtype=np.int32), list(range(16)))
        assert index.apply(KvUpdate(worker, 0, (event,)))
    assert len(index.holders) == 4
    assert match(index, np.arange(18, dtype=np.int32)) == [16, 16, 16]


def test_each_worker_matches_as_far_as_it_holds() -> None:
    index = make_index(A, B, C)
    values = np.arange(20, dtype=np.int32)
    index.apply(KvUpdate(A, 0, (stored(values[:10], list(range(10))),)))
    index.apply(KvUpdate(B, 0, (stored(values[:16], list(range(16))),)))
    assert match(index, values) == [8, 16, 0]
    # The rest of A's third block comes as a child of its last page.
    index.apply(KvUpdate(A, 1, (stored(values[10:12], [10, 11], parent=9),)))
    assert match(index, values) == [12, 16, 0]
    index.apply(KvUpdate(B, 1, (PagesRemoved(np.array([15, 14], np.int32)),)))
    assert match(index, values) == [12, 12, 0]
    index.apply(KvUpdate(B, 2, (PagesCleared(),)))
    assert match(index, values) == [12, 0, 0]
    index.validate()


def test_namespaces_do_not_match_each_other() -> None:
    index = make_index(A)
    values = np.arange(8, dtype=np.int32)
    event = PagesStored("adapter", None, values, np.arange(8, dtype=np.int32))
    index.apply(KvUpdate(A, 0, (event,)))
    assert match(index, values, 1) == [0]
    assert match(index, values, 1, "adapter") == [8]


def test_a_gap_empties_the_worker_until_its_snapshot() -> None:
    index = make_index(A)
    values = np.arange(12, dtype=np.int32)
    first = stored(values[:4], [0, 1, 2, 3])
    second = stored(values[4:8], [4, 5, 6, 7], parent=3)
    third = stored(values[8:], [8, 9, 10, 11], parent=7)
    assert index.apply(KvUpdate(A, 0, (first,)))
    assert not index.apply(KvUpdate(A, 2, (third,)))  # the second was lost
    assert index.stale(A)
    assert match(index, values, 1) == [0]
    assert not index.apply(KvUpdate(A, 3, ()))
    assert index.apply(KvUpdate(A, 3, (first, second), snapshot=True))
    assert match(index, values, 1) == [8]
    assert index.apply(KvUpdate(A, 3, (third,)))
    assert match(index, values, 1) == [12]
    index.validate()


def test_events_seen_twice_and_events_of_a_former_life_count_once_and_never() -> None:
    index = make_index(A)
    values = np.arange(8, dtype=np.int32)
    events = (stored(values[:4], [0, 1, 2, 3]), stored(values[4:], [4, 5, 6, 7], parent=3))
    index.apply(KvUpdate(A, 0, events[:1]))
    index.apply(KvUpdate(A, 0, events))  # the first again, and one more
    assert match(index, values, 1) == [8]
    index.apply(KvUpdate(A, 2, (PagesCleared(),)))
    assert index.apply(KvUpdate(A, 0, events))
    assert match(index, values, 1) == [0]
    assert index.apply(KvUpdate(WorkerId("prefill-0", "before"), 0, events))
    assert match(index, values, 1) == [0]


def test_a_snapshot_that_comes_again_takes_nothing_back() -> None:
    index = make_index(A)
    values = np.arange(8, dtype=np.int32)
    snapshot = KvUpdate(A, 5, (stored(values[:4], list(range(4))),), snapshot=True)
    assert index.apply(snapshot)
    held = match(index, values)
    later = stored(np.arange(50, 54, dtype=np.int32), list(range(10, 14)))
    assert index.apply(KvUpdate(A, 5, (later,)))
    assert index.apply(snapshot)
    assert match(index, values) == held
    assert match(index, np.arange(50, 54, dtype=np.int32))[0] == 4


def test_an_event_after_an_unknown_page_asks_for_a_snapshot() -> None:
    index = make_index(A)
    assert not index.apply(KvUpdate(A, 0, (stored(tokens(1, 2, 3, 4), [1, 2, 3, 4], parent=0),)))
    assert index.stale(A)


def test_a_worker_that_goes_takes_its_entries_with_it() -> None:
    """Case 22: whoever takes its slot starts from what it really holds."""
    index = make_index(A, B)
    values = np.arange(8, dtype=np.int32)
    for worker in (A, B):
        index.apply(KvUpdate(worker, 0, (stored(values, list(range(8))),)))
    index.leave(A)
    assert match(index, values, 2) == [0, 8]
    index.join(WorkerId("prefill-0", "i1"), 0)
    assert match(index, values, 2) == [0, 8]
    index.validate()


def below(index: PrefixIndex, values: IntArray, held: list[int]) -> tuple[list[int], list[int]]:
    found = index.match_below(block_hashes(values, index.block).tolist(), np.array(held))
    assert found is not None
    return found[0].tolist(), found[1].tolist()


def host(event: PagesStored) -> PagesStored:
    return replace(event, tier="host")


def test_each_tier_is_known_apart_and_a_shared_chain_is_stored_once_on_it() -> None:
    index = make_index(A, B)
    values = np.arange(16, dtype=np.int32)
    assert index.match_below([1, 2], np.zeros(2, np.int64)) is None
    index.apply(KvUpdate(A, 0, (stored(values[:8], list(range(8))),)))
    # Pages of different tiers have the same numbers.
    for worker, first in ((A, 1), (B, 0)):
        index.apply(KvUpdate(worker, first, (host(stored(values, list(range(16)))),)))
    assert (len(index.holders), len(index.hosts)) == (2, 4)
    assert match(index, values, 2) == [8, 0]
    assert below(index, values, [8, 0]) == ([16, 16], [16, 16])
    # What leaves the pool stays below; what leaves the host tier as well is gone.
    index.apply(KvUpdate(A, 2, (PagesCleared(),)))
    assert match(index, values, 2) == [0, 0]
    assert below(index, values, [0, 0])[0] == [16, 16]
    index.apply(KvUpdate(A, 3, (PagesRemoved(np.arange(8, 16), "host"),)))
    assert below(index, values, [0, 0])[0] == [8, 16]
    index.apply(KvUpdate(B, 1, (PagesCleared("host"),)))
    assert below(index, values, [0, 12])[0] == [8, 12], "never less than the pool's own"
    index.validate()


def test_a_gap_and_a_death_empty_every_tier_of_the_worker() -> None:
    index = make_index(A, B)
    values = np.arange(8, dtype=np.int32)
    whole = (stored(values, list(range(8))), host(stored(values, list(range(8)))))
    for worker in (A, B):
        index.apply(KvUpdate(worker, 0, whole))
    assert not index.apply(KvUpdate(A, 9, ()))
    assert match(index, values, 2) == [0, 8]
    assert below(index, values, [0, 8])[0] == [0, 8]
    index.apply(KvUpdate(A, 9, whole, snapshot=True))
    assert below(index, values, [0, 0])[0] == [8, 8]
    index.leave(B)
    assert below(index, values, [0, 0])[0] == [8, 0]
    index.validate()


def test_a_store_is_known_to_all_who_share_it_and_outlives_them() -> None:
    stores = Stores()
    prefill, decode = PrefixIndex(1, 4, stores), PrefixIndex(1, 4, stores)
    prefill.join(A, 0, "file@one")
    prefill.join(B, 1, "file@two")
    decode.join(C, 0, "file@one")
    values = np.arange(12, dtype=np.int32)
    pages = np.arange(12, dtype=np.int32)
    prefill.apply(KvUpdate(A, 0, (host(stored(values, pages.tolist())),)))
    # Its second block, by its pages; then the third, of which one page has left the host.
    prefill.apply(KvUpdate(A, 1, (StorageHolds(pages[4:8]),)))
    prefill.apply(KvUpdate(A, 2, (PagesRemoved(pages[11:], "host"), StorageHolds(pages[8:]))))
    assert below(prefill, values, [0, 4]) == ([8, 4], [8, 4])
    assert below(decode, values, [4]) == ([4], [8])
    assert below(decode, values, [0]) == ([0], [0]), "a run from where the pool's own ends"
    prefill.leave(A)
    assert below(decode, values, [4]) == ([4], [8])
    decode.validate()
    prefill.validate()


def test_of_too_many_stored_blocks_the_oldest_go() -> None:
    stores = Stores(limit=3)
    stores.add("s", [1, 2, 3])
    stores.add("s", [1, 4])
    runs = stores.runs("s", [1, 2, 3, 4])
    assert runs is not None
    assert runs.tolist() == [1, 1, 4, 4, 4]
    assert stores.runs("s", [2]) is None
    assert stores.runs("other", [1]) is None


def test_what_is_expected_counts_until_every_attempt_takes_it_back() -> None:
    index = make_index(A, B)
    values = np.arange(8, dtype=np.int32)
    hashes = block_hashes(values, 4).tolist()
    index.expected.add(hashes, 1)
    index.expected.add(hashes[:1], 1)
    assert match(index, values, 2) == [0, 8]
    index.expected.remove(hashes, 1)
    assert match(index, values, 2) == [0, 4]
    index.expected.remove(hashes[:1], 1)
    assert match(index, values, 2) == [0, 0]
    assert len(index.expected.table) == 0
    with pytest.raises(KeyError):
        ExpectedTable().remove(hashes, 0)


@pytest.mark.parametrize("page_size", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_it_follows_real_caches(seed: int, page_size: int) -> None:
    """Random publishes, evictions, resets, lost updates: what it says is what the trees hold."""
    rng = random.Random(seed)
    index = make_index(A, B, page_size=page_size)
    policy = make_eviction_policy("lru", {})
    caches = {
        worker: PrefixCache(PagePool(64 // page_size), page_size, policy, record_events=True)
        for worker in (A, B)
    }
    sent = dict.fromkeys(caches, 0)
    prompts = [np.array([rng.randrange(3) for _ in range(40)], np.int32) for _ in range(5)]

    def flush(worker: WorkerId) -> None:
        events = tuple(caches[worker].take_events())
        lost = rng.random() < 0.1
        if not lost and not index.apply(KvUpdate(worker, sent[worker], events)):
            held = tuple(caches[worker].snapshot())
            assert index.apply(KvUpdate(worker, sent[worker] + len(events), held, snapshot=True))
        sent[worker] += len(events)

    for step in range(300):
        worker = rng.choice([A, B])
        cache = caches[worker]
        prompt = rng.choice(prompts)[: rng.randrange(page_size, 41)]
        if rng.random() < 0.03:
            cache.reset()
        else:
            found = cache.match(prompt, now=float(step), count_hit=True)
            cache.lock(found.node)
            try:
                fresh = cache.allocate(-(-len(prompt) // page_size) - len(found.pages), float(step))
            except OutOfPages:
                cache.unlock(found.node)
            else:
                table = np.concatenate([found.pages, fresh])
                cache.finish(prompt, table, found.node, now=float(step))
        flush(worker)
        index.validate()
        for slot, (other, held) in enumerate(caches.items()):
            if index.stale(other) or cache._events:
                continue
            if sent[other] != index._holdings[other].next:
                continue  # its last update was lost, and nobody can know yet
            for probe in prompts:
                length = held.match(probe, now=float(step), count_hit=False).length
                assert match(index, probe, 2)[slot] == length // index.block * index.block


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(3))
def test_it_follows_a_real_cache_with_tiers(seed: int, write: WritePolicy) -> None:
    """Copies that end late, evictions from both tiers, blocks written to storage and read back."""
    rng = random.Random(seed)
    tiers = Tiers(device=24, host=40, storage={}, write_policy=write, record_events=True)
    index = PrefixIndex(1, tiers.block)
    index.join(A, 0, "store")
    prompts = [np.array([rng.randrange(3) for _ in range(16)], np.int32) for _ in range(6)]
    first, seen = 0, [0, 0]
    for _ in range(200):
        prompt = rng.choice(prompts)[: rng.randrange(4, 17)]
        with suppress(OutOfPages):  # too much of the pool is being copied
            tiers.run(prompt)
        for _ in range(rng.randrange(4)):
            tiers.step()
        events = tuple(tiers.cache.take_events())
        assert index.apply(KvUpdate(A, first, events))
        first += len(events)
        index.validate()
        for probe in prompts:
            hashes = block_hashes(probe, index.block).tolist()
            held = index.match(hashes, 1)
            assert held[0] == tiers.cache.tree.walk(probe, None)[1] // 4 * 4
            reach, stored = (depth[0] for depth in index.match_below(hashes, held) or (held, held))
            assert reach == max(held[0], tiers.cache.host.tree.walk(probe, None)[1] // 4 * 4)
            seen = [seen[0] + (reach > held[0]), seen[1] + (stored > reach)]
            ends = range(int(reach) + 4, int(stored) + 1, 4)
            assert all((None, tuple(probe[:end].tolist())) in tiers.storage for end in ends)
    assert min(seen) > 0, seen
    whole = tuple(tiers.cache.snapshot())
    index.apply(KvUpdate(A, first + 5, ()))
    assert index.apply(KvUpdate(A, first + 5, whole, snapshot=True))
    hashes = block_hashes(prompts[0], index.block).tolist()
    assert index.match(hashes, 1)[0] == tiers.cache.tree.walk(prompts[0], None)[1] // 4 * 4
