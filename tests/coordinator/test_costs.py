"""Rates: from priors to what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pd_cluster.coordinator.costs import (
    DecodeMeasured,
    LinkMeasured,
    PrefillMeasured,
    Priors,
    Rates,
    TierMeasured,
)
from pd_cluster.types import WorkerId

P, D, E = WorkerId("prefill-0", "a"), WorkerId("decode-0", "a"), WorkerId("decode-1", "a")


def test_priors_hold_before_anything_is_measured() -> None:
    rates = Rates(Priors(prefill=(0.1, 0.01, 0.0), decode=(0.02, 0.001, 0.0)))
    assert rates.prefill_s(10, 0) == pytest.approx(0.2)
    assert rates.step_s(5, 1000) == pytest.approx(0.025)


def test_measured_times_replace_wrong_priors() -> None:
    """Ten times off in every coefficient; prefill's time grows with what stands before."""
    rates = Rates(Priors(prefill=(0.1, 0.01, 1e-5), decode=(0.2, 0.01, 1e-4)))
    rng = random.Random(0)
    for _ in range(300):
        n, cached = rng.randrange(1, 4000), rng.randrange(0, 20_000)
        attended = n * (cached + n / 2)
        rates.observe(P, PrefillMeasured(n, attended, 0.01 + 0.001 * n + 1e-6 * attended))
        batch, held = rng.randrange(1, 60), rng.randrange(100, 100_000)
        rates.observe(D, DecodeMeasured(batch, held, 0.02 + 0.001 * batch + 1e-5 * held))
    for n, cached in ((100, 0), (2000, 10_000)):
        true = 0.01 + 0.001 * n + 1e-6 * n * (cached + n / 2)
        assert rates.prefill_s(n, cached) == pytest.approx(true, rel=0.1)
    assert rates.step_s(30, 50_000) == pytest.approx(0.55, rel=0.1)


def test_rates_follow_a_change_and_are_never_negative() -> None:
    rates = Rates(Priors(prefill=(0.0, 0.01, 0.0)))
    for seconds in (0.001, 0.004):
        for n in range(1, 1500):
            rates.observe(P, PrefillMeasured(n % 100 + 1, 0.0, seconds * (n % 100 + 1)))
        assert rates.prefill_s(100, 0) == pytest.approx(100 * seconds, rel=0.1)
    # Longer steps that took less time: no coefficient turns negative for it.
    for n in range(1, 500):
        rates.observe(P, PrefillMeasured(n, 0.0, 1.0 / n))
    assert (rates.prefill.coefficients >= 0).all()


def test_links_are_learnt_by_pair_and_forgotten_with_their_worker() -> None:
    """One of two links is four times as slow; the prior was ten times too fast for both."""
    rates = Rates(Priors(link_bytes_per_s=1e9, link_latency_s=1e-3, kv_bytes_per_token=1000))
    rng = random.Random(0)
    for _ in range(600):
        tokens = rng.randrange(1, 5000)
        for peer, times in ((D, 1.0), (E, 4.0)):
            rates.observe(P, LinkMeasured(peer, tokens, times * (1e-2 + 1e-5 * tokens)))
    factors = rates.link_factors(P, {D: 2, E: 0}, 3)
    assert factors[1] == 1.0, "nothing is known of it"
    found = rates.transfer_s(np.array([2000, 2000, 2000]), factors)
    assert found[2] == pytest.approx(0.03, rel=0.1)
    assert found[0] == pytest.approx(0.12, rel=0.1)
    rates.forget(D)
    assert D not in rates.pairs[P]
    rates.forget(P)
    assert not rates.pairs


def test_reads_from_a_tier_are_learnt_and_each_tier_apart() -> None:
    rates = Rates()
    before = rates.read_s("storage", np.array([0, 1000]))
    for tokens in (100, 1000, 4000):
        for _ in range(100):
            rates.observe(P, TierMeasured("host", tokens, 2e-3 + tokens * 5e-6))
    read = rates.read_s("host", np.array([0, 2000]))
    assert read[0] == 0.0, "nothing to read takes no time"
    assert read[1] == pytest.approx(12e-3, rel=0.02)
    assert np.array_equal(rates.read_s("storage", np.array([0, 1000])), before)


def test_a_prior_that_is_far_off_is_not_held_on_to() -> None:
    """Too fast or too slow by a factor of a thousand."""
    for factor in (1e-3, 1e3):
        rates = Rates()
        truth = 640 * 1e-5 * factor
        for _ in range(50):
            rates.observe(P, TierMeasured("host", 640, truth))
        assert rates.read_s("host", np.array([640]))[0] == pytest.approx(truth, rel=0.05)
