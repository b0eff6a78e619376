"""What workers tell of their caches survives the way, and what is no such message harms nobody."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.cache.events import PagesCleared, PagesRemoved, PagesStored, StorageHolds
from pd_cluster.coordinator.costs import (
    DecodeMeasured,
    LinkMeasured,
    Measured,
    PrefillMeasured,
    TierMeasured,
)
from pd_cluster.coordinator.index import KvUpdate
from pd_cluster.coordinator.wire import decode_update, encode_update
from pd_cluster.errors import WireError
from pd_cluster.types import WorkerId

WORKER = WorkerId("decode-0", "a")


def test_every_event_and_measurement_comes_back() -> None:
    pages = np.array([3, 4], np.int32)
    stored = PagesStored("salt", 2, np.arange(32, dtype=np.int32), pages)
    told = (stored, PagesRemoved(pages, "host"), PagesCleared("host"), StorageHolds(pages))
    update = KvUpdate(WORKER, 7, told, snapshot=True)
    measured: list[Measured] = [
        PrefillMeasured(10, 45.0, 0.5),
        DecodeMeasured(2, 100, 0.1),
        LinkMeasured(WORKER, 4096, 0.01),
        TierMeasured("storage", 64, 0.02),
    ]
    back, back_measured = decode_update(encode_update(update, measured))
    assert (back.worker, back.first, back.snapshot) == (WORKER, 7, True)
    assert back_measured == measured
    first, second, third, fourth = back.events
    assert isinstance(first, PagesStored)
    assert (first.namespace, first.parent, first.tier) == ("salt", 2, "device")
    assert np.array_equal(first.tokens, stored.tokens)
    assert np.array_equal(first.pages, pages)
    assert isinstance(second, PagesRemoved)
    assert np.array_equal(second.pages, pages)
    assert second.tier == "host"
    assert third == PagesCleared("host")
    assert isinstance(fourth, StorageHolds)
    assert np.array_equal(fourth.pages, pages)


def test_what_does_not_fit_is_a_wire_error() -> None:
    ints = np.arange(3, dtype=np.int32)
    for event in (
        PagesStored(None, None, ints, ints[:2]),
        PagesStored(None, None, ints[:0], ints[:0]),
        PagesStored(None, None, ints[:1], -ints[1:2]),
    ):
        with pytest.raises(WireError):
            decode_update(encode_update(KvUpdate(WORKER, 0, (event,))))
    with pytest.raises(WireError):
        decode_update(b"\x93nonsense")
