from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pd_cluster.cache.page_pool import OutOfPages, PageCounts, PagePool, Pages, PageStateError


def pages_of(*ids: int) -> Pages:
    return np.array(ids, np.int32)


@pytest.fixture
def pool() -> Iterator[PagePool]:
    pool = PagePool(16)
    yield pool
    pool.validate()


def test_all_pages_can_be_had_once(pool: PagePool) -> None:
    pages = np.concatenate([pool.allocate(5), pool.allocate(0), pool.allocate(11)])
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == list(range(16))
    with pytest.raises(OutOfPages) as caught:
        pool.allocate(1)
    assert (caught.value.needed, caught.value.free) == (1, 0)
    pool.free(pages)
    assert pool.counts() == PageCounts(free=16, private=0, in_flight=0, protected=0, evictable=0)


def test_a_refused_allocation_takes_nothing(pool: PagePool) -> None:
    with pytest.raises(OutOfPages, match="17 pages needed, 16 to be had"):
        pool.allocate(17)
    assert pool.allocate(16).size == 16


def test_pages_come_in_runs_where_there_are_any() -> None:
    pool = PagePool(32)
    taken = pool.allocate(32)
    # Free: 1, 3, 5, 7 (holes) and the run 10..19.
    pool.free(np.concatenate([taken[[1, 3, 5, 7]], taken[10:20][::-1]]))
    run = pool.allocate(6)
    assert run.tolist() == [10, 11, 12, 13, 14, 15]
    assert pool.allocate(4).tolist() == [16, 17, 18, 19]
    assert pool.allocate(4).tolist() == [1, 3, 5, 7]
    pool.validate()


def test_the_tightest_pages_are_taken_where_there_is_no_run() -> None:
    pool = PagePool(32)
    taken = pool.allocate(32)
    pool.free(taken[[0, 9, 20, 22, 23, 31]])
    assert pool.allocate(3).tolist() == [20, 22, 23]
    assert pool.allocate(3).tolist() == [0, 9, 31]
    pool.validate()


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        (pages_of(3, 3), "page 3 cannot be freed: it is named twice"),
        (pages_of(12), "page 12 cannot be freed: it is free"),
    ],
)
def test_a_page_is_freed_once(pool: PagePool, twice: Pages, message: str) -> None:
    pool.allocate(8)
    with pytest.raises(PageStateError, match=message):
        pool.free(twice)
    pool.free(pages_of(3))
    with pytest.raises(PageStateError, match="page 3 cannot be freed: it is free"):
        pool.free(pages_of(2, 3))
    assert pool.counts().private == 7


@pytest.mark.parametrize("page", [-1, 16])
def test_numbers_outside_the_pool_are_refused(pool: PagePool, page: int) -> None:
    pool.allocate(16)
    for use in (pool.free, pool.begin_flight, pool.end_flight, pool.publish, pool.evict):
        with pytest.raises(IndexError):
            use(pages_of(page))


def test_other_types_of_page_numbers_are_refused(pool: PagePool) -> None:
    pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.free(np.array([1, 2]))  # type: ignore[arg-type]
    assert pool.counts().private == 4


def test_in_flight_counts_before_any_other_state(pool: PagePool) -> None:
    pages = pool.allocate(6)
    pool.publish(pages[:4])
    pool.protect(pages[:2])
    pool.begin_flight(pages[1:5])
    assert pool.counts() == PageCounts(free=10, private=1, in_flight=4, protected=1, evictable=0)
    pool.unprotect(pages[:2])
    assert pool.counts() == PageCounts(free=10, private=1, in_flight=4, protected=0, evictable=1)
    pool.publish(pages[4:5])
    pool.validate()
    pool.end_flight(pages[1:5])
    assert pool.counts() == PageCounts(free=10, private=1, in_flight=0, protected=0, evictable=5)


def test_a_page_freed_in_flight_waits_for_the_last_of_its_flights(pool: PagePool) -> None:
    pages = pool.allocate(16)
    pool.begin_flight(pages[:2])
    pool.begin_flight(pages[:1])
    pool.free(pages[:3])
    assert pool.counts() == PageCounts(free=1, private=13, in_flight=2, protected=0, evictable=0)
    pool.end_flight(pages[:2])
    assert pool.counts().free == 2
    assert pool.allocate(2).tolist() == pages[1:3].tolist()
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.validate()
    pool.end_flight(pages[:1])
    assert pool.allocate(1).tolist() == pages[:1].tolist()


def test_an_evicted_page_in_flight_is_not_free_at_once(pool: PagePool) -> None:
    pages = pool.allocate(4)
    pool.publish(pages)
    pool.begin_flight(pages[:1])
    assert pool.count_idle(pages) == 3
    assert pool.evict(pages) == 3
    assert pool.counts() == PageCounts(free=15, private=0, in_flight=1, protected=0, evictable=0)
    with pytest.raises(PageStateError, match="page 0 cannot be put in flight: it is quarantined"):
        pool.begin_flight(pages[:1])
    pool.end_flight(pages[:1])
    assert pool.counts().free == 16


def test_flights_are_balanced_and_of_owned_pages(pool: PagePool) -> None:
    pages = pool.allocate(2)
    with pytest.raises(PageStateError, match="page 5 cannot be put in flight: it is free"):
        pool.begin_flight(pages_of(5))
    with pytest.raises(PageStateError, match="page 0 cannot be landed: it is private, in 0 fl"):
        pool.end_flight(pages)
    with pytest.raises(PageStateError, match="named twice"):
        pool.begin_flight(pages_of(1, 1))
    pool.begin_flight(pages)
    with pytest.raises(PageStateError, match="named twice"):
        pool.end_flight(pages_of(1, 1))
    pool.end_flight(pages)
    assert pool.counts().in_flight == 0


def test_the_callers_array_stays_the_callers(pool: PagePool) -> None:
    pages = pool.allocate(16)
    pool.free(pages)
    pages[:] = 0
    assert sorted(pool.allocate(16).tolist()) == list(range(16))


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, not 0"):
        PagePool(0)


def test_random_use_conserves_pages() -> None:
    rng = np.random.default_rng(0)
    pool = PagePool(97)
    held: list[Pages] = []
    for _ in range(2000):
        if rng.random() < 0.55:
            n = int(rng.integers(0, 12))
            if n > pool.free_count:
                continue
            pages = pool.allocate(n)
            assert np.unique(pages).size == n
            if held:
                assert not np.isin(pages, np.concatenate(held)).any()
            held.append(pages)
        elif held:
            pages = held.pop(int(rng.integers(len(held))))
            pool.free(rng.permutation(pages))
        assert pool.free_count == 97 - sum(pages.size for pages in held)
        pool.validate()
