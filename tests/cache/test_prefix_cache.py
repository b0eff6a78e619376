"""The prefix cache: sharing, locks, duplicates, quarantine, eviction, flush."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pd_cluster.cache.events import PagesCleared, PagesRemoved, PagesStored
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import OutOfPages, PageCounts, PagePool, Pages, PageStateError
from pd_cluster.cache.prefix_cache import PrefixCache, Published
from pd_cluster.cache.radix_tree import StaleNode


def ids(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text(node: Node) -> str:
    return bytes(node.tokens.tolist()).decode()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now


class Worker:
    """What a worker does with its cache, in the order in which it does it."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.clock = Clock()

    def start(self, prompt: str, namespace: str | None = None) -> tuple[Node, Pages]:
        tokens = ids(prompt)
        match = self.cache.match(tokens, namespace, now=self.clock.tick(), count_hit=True)
        self.cache.lock(match.node)
        num_pages = -(-tokens.size // self.cache.page_size)
        own = self.cache.allocate(num_pages - match.pages.size, self.clock.now)
        return match.node, np.concatenate([match.pages, own])

    def publish(
        self, prompt: str, node: Node, pages: Pages, namespace: str | None = None, priority: int = 0
    ) -> Published:
        published = self.cache.publish(
            ids(prompt), pages, namespace, now=self.clock.tick(), priority=priority
        )
        self.cache.move_lock(node, published.node)
        return published

    def run(self, prompt: str, namespace: str | None = None, priority: int = 0) -> int:
        """A whole request. Returns the tokens that it found."""
        length = self.cache.match(
            ids(prompt), namespace, now=self.clock.now, count_hit=False
        ).length
        node, pages = self.start(prompt, namespace)
        self.cache.finish(
            ids(prompt), pages, node, namespace, now=self.clock.tick(), priority=priority
        )
        return length

    def peek(self, prompt: str, namespace: str | None = None) -> int:
        return self.cache.match(ids(prompt), namespace, now=self.clock.now, count_hit=False).length


def make_worker(
    num_pages: int = 64,
    page_size: int = 1,
    policy: str = "lru",
    *,
    enabled: bool = True,
    record_events: bool = False,
) -> Worker:
    cache = PrefixCache(
        PagePool(num_pages),
        page_size,
        make_eviction_policy(policy, {}),
        enabled=enabled,
        record_events=record_events,
    )
    return Worker(cache)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = make_worker()
    yield worker
    worker.cache.validate()


def test_three_requests_share_slots_splits_and_locks(worker: Worker) -> None:
    cache = worker.cache
    worker.run("AB")
    ab = cache.match(ids("AB"), now=0.0, count_hit=False).pages.tolist()

    node1, table1 = worker.start("ABCD")
    assert table1[:2].tolist() == ab
    published1 = worker.publish("ABCD", node1, table1)
    node2, table2 = worker.start("ABCF")
    assert table2[:3].tolist() == table1[:3].tolist()
    published2 = worker.publish("ABCF", node2, table2)
    node3, table3 = worker.start("ABGH")
    assert table3[:2].tolist() == ab
    published3 = worker.publish("ABGH", node3, table3)

    locks = {text(node): node.lock_ref for node in cache.tree.nodes()}
    assert locks == {"AB": 3, "C": 2, "GH": 1, "D": 1, "F": 1}
    tables = np.stack([table1, table2, table3])
    assert np.unique(tables).size == 7
    assert cache.counts() == PageCounts(free=57, private=0, in_flight=0, protected=7, evictable=0)
    for published in (published1, published2, published3):
        cache.unlock(published.node)
    assert cache.counts() == PageCounts(free=57, private=0, in_flight=0, protected=0, evictable=7)


def test_duplicates_are_released_and_the_table_points_at_the_kept_pages(worker: Worker) -> None:
    """Case 18: two requests of one batch compute the same prefix."""
    cache = worker.cache
    node1, table1 = worker.start("ABCD")
    node2, table2 = worker.start("ABCE")
    assert not set(table1.tolist()) & set(table2.tolist())
    published1 = worker.publish("ABCD", node1, table1)
    before = cache.counts()
    published2 = worker.publish("ABCE", node2, table2)
    assert published2.pages.tolist() == [*table1[:3].tolist(), int(table2[3])]
    assert published2.duplicates.tolist() == table2[:3].tolist()
    assert cache.counts().free == before.free + 3
    # The kept pages are in no free list: what is allocated now cannot be one of them.
    later = cache.allocate(cache.available(), worker.clock.now)
    assert not set(later.tolist()) & set(published2.pages.tolist())
    cache.release(later)
    cache.unlock(published1.node)
    cache.unlock(published2.node)


def test_duplicates_in_flight_are_quarantined(worker: Worker) -> None:
    cache = worker.cache
    worker.run("ABC")
    node, table = worker.start("XYZ")
    cache.pool.begin_flight(table)
    own = worker.publish("XYZ", node, table)
    twin = cache.allocate(3, worker.clock.now)
    cache.pool.begin_flight(twin[:2])
    published = cache.publish(ids("XYZ"), twin, now=worker.clock.tick())
    assert published.pages.tolist() == table.tolist()
    assert cache.counts() == PageCounts(
        free=64 - 3 - 3 - 2, private=0, in_flight=5, protected=0, evictable=3
    )
    cache.pool.end_flight(twin[:2])
    assert cache.counts().free == 64 - 6
    cache.pool.end_flight(table)
    assert cache.counts().protected == 3
    cache.unlock(own.node)


def test_an_evicted_page_in_flight_is_free_only_after_its_last_flight() -> None:
    worker = make_worker(num_pages=4)
    cache = worker.cache
    worker.run("AB")
    pages = cache.match(ids("AB"), now=0.0, count_hit=False).pages
    cache.pool.begin_flight(pages[:1])
    cache.pool.begin_flight(pages[:1])
    assert cache.available() == 3
    with pytest.raises(OutOfPages, match="4 pages needed, 3 to be had"):
        cache.allocate(4, worker.clock.now)
    assert worker.peek("AB") == 2, "a failed allocation must evict nothing"
    held = cache.allocate(3, worker.clock.now)
    assert int(pages[0]) not in held.tolist()
    assert worker.peek("AB") == 0
    cache.validate()
    cache.pool.end_flight(pages[:1])
    assert cache.counts().free == 0
    cache.pool.end_flight(pages[:1])
    assert cache.counts() == PageCounts(free=1, private=3, in_flight=0, protected=0, evictable=0)
    cache.release(held)
    cache.validate()


def test_a_locked_prefix_is_never_evicted() -> None:
    worker = make_worker(num_pages=6)
    node, table = worker.start("ABCD")
    published = worker.publish("ABCD", node, table)
    worker.run("XY")
    with pytest.raises(OutOfPages):
        worker.cache.allocate(3, worker.clock.now)
    held = worker.cache.allocate(2, worker.clock.now)
    assert worker.peek("ABCD") == 4
    assert worker.peek("XY") == 0
    worker.cache.unlock(published.node)
    worker.cache.release(held)
    worker.cache.validate()


def test_eviction_takes_whole_leaves_and_stops_when_none_is_left(worker: Worker) -> None:
    cache = worker.cache
    for prompt in ("ABCD", "XY", "Q"):
        worker.run(prompt)
    node, table = worker.start("ZZZ")
    assert cache.evict(0, worker.clock.now) == 0
    assert cache.evict(1, worker.clock.now) == 4
    assert [worker.peek(prompt) for prompt in ("ABCD", "XY", "Q")] == [0, 2, 1]
    assert cache.evict(9, worker.clock.now) == 3
    assert cache.evict(9, worker.clock.now) == 0
    assert cache.statistics().evicted == 7
    cache.finish(ids("ZZZ"), table, node, now=worker.clock.tick())


def test_a_prefix_matched_but_not_locked_can_go_and_the_lock_says_so() -> None:
    worker = make_worker(num_pages=4)
    worker.run("ABC")
    match = worker.cache.match(ids("ABC"), now=worker.clock.tick(), count_hit=True)
    held = worker.cache.allocate(4, worker.clock.now)
    with pytest.raises(StaleNode):
        worker.cache.lock(match.node)
    worker.cache.release(held)
    # Publishing does not need the node: what was evicted is simply inserted again.
    node, table = worker.start("ABC")
    assert worker.publish("ABC", node, table).length == 3
    worker.cache.validate()


def test_a_flush_drops_what_is_unlocked_and_makes_its_nodes_stale(worker: Worker) -> None:
    cache = worker.cache
    node, table = worker.start("ABCD")
    published = worker.publish("ABCD", node, table)
    worker.run("ABXY")
    worker.run("Q")
    stale = cache.match(ids("ABXY"), now=0.0, count_hit=False).node
    assert cache.reset() == 3
    assert worker.peek("ABCD") == 4
    assert worker.peek("ABXY") == 2
    with pytest.raises(StaleNode):
        cache.lock(stale)
    cache.unlock(published.node)
    assert cache.reset() == 4
    assert cache.reset() == 0
    assert cache.statistics().nodes == 0


def test_a_sequence_publishes_chunk_by_chunk_and_its_lock_follows() -> None:
    worker = make_worker(page_size=4)
    cache = worker.cache
    prompt = "abcdefghijklmn"
    node, table = worker.start(prompt)
    for end in (6, 6, 12, 14):
        published = worker.publish(prompt[:end], node, table)
        node, table = published.node, published.pages
        assert published.length == end // 4 * 4
        assert cache.counts().protected == end // 4
    cache.validate()
    cache.finish(ids(prompt + "opqr"), np.append(table, cache.allocate(1, 0.0)), node, now=9.0)
    assert cache.counts() == PageCounts(free=60, private=0, in_flight=0, protected=0, evictable=4)
    assert worker.peek(prompt + "opqrst") == 16
    cache.validate()


def test_strip_thinking_publishes_the_prompt_and_releases_the_answer() -> None:
    worker = make_worker(page_size=2)
    node, table = worker.start("abcdeANSWER")
    worker.cache.finish(ids("abcde"), table, node, now=worker.clock.tick())
    assert worker.peek("abcdeANSWER") == 4
    assert worker.cache.counts() == PageCounts(
        free=62, private=0, in_flight=0, protected=0, evictable=2
    )
    worker.cache.validate()


def test_disabled_it_keeps_nothing() -> None:
    worker = make_worker(enabled=False)
    cache = worker.cache
    node, table = worker.start("ABCD")
    published = worker.publish("ABCD", node, table)
    assert (published.length, published.pages.tolist()) == (0, table.tolist())
    assert cache.counts().private == 4, "a sequence that goes on must keep its pages"
    cache.finish(ids("ABCD"), published.pages, published.node, now=worker.clock.tick())
    assert worker.run("ABCD") == 0
    assert cache.counts().free == 64
    assert (cache.statistics().queries, cache.statistics().hits) == (8, 0)
    cache.validate()


def test_namespaces_never_share() -> None:
    worker = make_worker()
    names: list[str | None] = [None, "", "a", "ab", ":a", "b"]
    for name in names:
        assert worker.run("ABCD", name) == 0
    pages = [
        worker.cache.match(ids("ABCD"), name, now=0.0, count_hit=False).pages for name in names
    ]
    assert np.unique(np.concatenate(pages)).size == 4 * len(names)
    assert worker.run("ABCE", "a") == 3
    assert worker.peek("ABCE", "b") == 3
    assert worker.peek("ABCE", "c") == 0
    namespaces = {worker.cache.tree.namespace(node) for node in worker.cache.tree.nodes()}
    assert namespaces == set(names)
    worker.cache.validate()


def test_peeks_count_nothing_and_keep_the_order_of_eviction() -> None:
    """Case 20: a request that is looked at again is not a further query."""
    worker = make_worker(num_pages=4)
    worker.run("AA")
    worker.run("BB")
    before = worker.cache.statistics()
    hits = [node.hit_count for node in worker.cache.tree.nodes()]
    for _ in range(3):
        assert worker.peek("AA") == 2
    assert worker.cache.statistics() == before
    assert [node.hit_count for node in worker.cache.tree.nodes()] == hits
    worker.cache.release(worker.cache.allocate(1, worker.clock.now))
    assert (worker.peek("AA"), worker.peek("BB")) == (0, 2)


def test_statistics_are_in_tokens() -> None:
    worker = make_worker(num_pages=3, page_size=2)
    worker.run("abcde")
    worker.run("abcdX")
    worker.run("vwxyz")
    statistics = worker.cache.statistics()
    assert (statistics.queries, statistics.hits, statistics.evicted) == (15, 4, 4)
    assert statistics.nodes == 1
    assert statistics.idle_before_eviction == 1.0


def test_a_hit_counts_once_per_request_and_node() -> None:
    worker = make_worker(page_size=1)
    worker.run("ABCD")
    node, table = worker.start("ABCDEFGH")
    for end in (5, 6, 8):
        published = worker.publish("ABCDEFGH"[:end], node, table)
        node = published.node
    worker.cache.finish(ids("ABCDEFGH"), table, node, now=worker.clock.tick())
    hits = {text(node): node.hit_count for node in worker.cache.tree.nodes()}
    assert hits == {"ABCD": 1, "E": 0, "F": 0, "GH": 0}


def test_a_prefix_keeps_the_highest_priority_that_published_it() -> None:
    worker = make_worker(num_pages=4, policy="priority")
    worker.run("AA", priority=1)
    worker.run("BB", priority=2)
    worker.run("AA", priority=3)
    worker.run("AA", priority=0)
    worker.cache.evict(1, worker.clock.now)
    assert (worker.peek("AA"), worker.peek("BB")) == (2, 0)
    worker.cache.validate()


def test_pages_that_are_not_the_sequences_own_are_refused(worker: Worker) -> None:
    cache = worker.cache
    worker.run("AB")
    cached = cache.match(ids("AB"), now=0.0, count_hit=False).pages
    with pytest.raises(PageStateError, match="cannot be published: it is evictable"):
        cache.publish(ids("XY"), cached, now=0.0)
    with pytest.raises(PageStateError, match="cannot be published: it is free"):
        cache.publish(ids("XY"), np.array([40, 41], np.int32), now=0.0)
    with pytest.raises(PageStateError, match="cannot be freed: it is evictable"):
        cache.release(cached)
    own = cache.allocate(1, 0.0)
    with pytest.raises(PageStateError, match="named twice"):
        cache.publish(ids("XY"), np.repeat(own, 2), now=0.0)


def test_events_rebuild_what_is_cached() -> None:
    worker = make_worker(num_pages=8, page_size=2, record_events=True)
    cache = worker.cache
    index: dict[int, tuple[str | None, str]] = {}

    def apply(events: list[object]) -> None:
        for event in events:
            match event:
                case PagesStored(namespace, parent, tokens, pages):
                    above = index[parent][1] if parent is not None else ""
                    letters = bytes(tokens.tolist()).decode()
                    for i, page in enumerate(pages.tolist()):
                        index[page] = (namespace, above + letters[: 2 * i + 2])
                case PagesRemoved(pages):
                    for page in pages.tolist():
                        del index[page]
                case PagesCleared():
                    index.clear()

    def held() -> dict[int, tuple[str | None, str]]:
        prefixes: dict[int, tuple[str | None, str]] = {}
        for node in cache.tree.nodes():
            above = ""
            up = node.parent
            while up is not None:
                above = text(up) + above
                up = up.parent
            for i, page in enumerate(node.pages.tolist()):
                prefix = above + text(node)[: 2 * i + 2]
                prefixes[page] = (cache.tree.namespace(node), prefix)
        return prefixes

    for prompt, name in [("abcdef", None), ("abcdXY", "n"), ("abcdYY", None), ("abQQ", None)]:
        worker.run(prompt, name)
        apply(list(cache.take_events()))
        assert index == held()
    worker.run("0123456789", None)
    apply(list(cache.take_events()))
    assert index == held()
    assert cache.take_events() == []
    live = dict(index)
    index.clear()
    apply(list(cache.snapshot()))
    assert index == live
    cache.reset()
    apply(list(cache.take_events()))
    assert index == {}
