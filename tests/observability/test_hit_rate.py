from __future__ import annotations

import pytest

from pd_cluster.observability.hit_rate import HitRate


def observe(rate: HitRate, *samples: tuple[float, int, int]) -> list[float]:
    rates = []
    for now, queries, hits in samples:
        rate.observe(now, queries, hits)
        rates.append(round(rate.rate, 3))
    return rates


def test_it_rises_from_the_first_request_on():
    rates = observe(HitRate(), (0, 100, 0), (1, 200, 90), (2, 300, 180))
    assert rates == [0.0, 0.45, 0.6]


def test_a_first_look_covers_the_whole_life():
    assert observe(HitRate(), (1000.0, 300, 180)) == [0.6]


def test_what_is_older_than_a_minute_no_longer_counts():
    rates = observe(HitRate(), (0, 100, 0), (30, 200, 0), (61, 300, 100), (91, 400, 200))
    assert rates == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("pause", [1, 59, 1000])
def test_an_idle_cache_keeps_its_figure(pause):
    rate = HitRate()
    observe(rate, (0, 100, 0), (61, 200, 50))
    assert observe(rate, (61 + pause, 200, 50), (62 + 2 * pause, 200, 50)) == [0.5, 0.5]


def test_memory_is_bounded_by_the_window():
    rate = HitRate()
    observe(rate, *((second, second, 0) for second in range(10_000)))
    assert len(rate._samples) < 70
