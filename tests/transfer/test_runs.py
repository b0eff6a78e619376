"""Merging, planning, copying and locating, against the plainest way to do each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import nixlNotAllowedError, nixlNotFoundError
from pd_transfer.messages import Post, ProtocolError, pack_runs, unpack_runs
from pd_transfer.regions import HOST, RegionTable
from pd_transfer.runs import COPIED, IN_PLACE, OWN_MESSAGE, Packing, gather, merge, plan, scatter

DRAM = nixl_mem_t.DRAM_SEG


def table(*rows: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    return np.array(rows, np.uint64).reshape(-1, 3)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3), st.integers(0, 1)),
        max_size=40,
    )
)
def test_merging_joins_what_is_contiguous_on_both_sides(
    pieces: list[tuple[int, int, int, int]],
) -> None:
    local = table(*[(a, n, 0) for a, _, n, _ in pieces])
    remote = table(*[(b, n, 0) for _, b, n, _ in pieces])
    regions = np.array([r for *_, r in pieces], np.int64)
    expected: list[list[int]] = []
    for a, b, n, r in pieces:
        last = expected[-1] if expected else None
        if n == 0:
            continue
        if last and last[0] + last[2] == a and last[1] + last[2] == b and last[3] == r:
            last[2] += n
        else:
            expected.append([a, b, n, r])
    runs = merge(local, remote, regions, np.zeros_like(regions))
    assert runs.local.tolist() == [row[0] for row in expected]
    assert runs.remote.tolist() == [row[1] for row in expected]
    assert runs.lengths.tolist() == [row[2] for row in expected]


@given(
    st.lists(
        st.sampled_from(
            [1, 384, 23040, *range(COPIED.run - 1, COPIED.run + 2), OWN_MESSAGE, 9_000_001]
        ),
        max_size=60,
    ),
    st.sampled_from([COPIED, IN_PLACE]),
)
def test_a_plan_carries_every_byte_once_in_order(lengths: list[int], packing: Packing) -> None:
    at: list[tuple[int, int]] = []  # (run, bytes of it covered so far)
    covered = dict.fromkeys(range(len(lengths)), 0)
    for message in plan(np.array(lengths, np.uint64), packing):
        if message.last - message.first == 1:
            assert message.offset == covered[message.first]
            covered[message.first] += message.nbytes
            assert message.nbytes <= OWN_MESSAGE
        else:
            assert message.nbytes == sum(lengths[message.first : message.last])
            assert message.nbytes <= packing.message
            assert max(lengths[message.first : message.last]) <= packing.run
            for run in range(message.first, message.last):
                covered[run] += lengths[run]
        at.append((message.first, message.offset))
    assert covered == dict(enumerate(lengths))
    assert at == sorted(at)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=40))
def test_gather_and_scatter(pieces: list[tuple[int, int]]) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    gaps = np.array([gap for gap, _ in pieces])
    lengths = np.array([length for _, length in pieces], np.uint64)
    starts = np.cumsum(gaps + lengths.astype(np.int64)) - lengths.astype(np.int64)
    shuffled = np.random.default_rng(1).permutation(len(pieces))
    starts, lengths = starts[shuffled], lengths[shuffled]
    addresses = (memory.ctypes.data + starts).astype(np.uint64)
    packed = gather(addresses, lengths)
    spans = [slice(a, a + n) for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    assert packed.tobytes() == b"".join(memory[span].tobytes() for span in spans)
    expected = memory.copy()
    for span in spans:
        expected[span] ^= 255
    scatter(packed ^ 255, addresses, lengths)
    assert np.array_equal(memory, expected)


def test_regions_contain_or_not() -> None:
    regions = RegionTable()
    regions.add(DRAM, table((100, 50, 0), (150, 50, 0), (300, 10, 1), (2**64 - 10, 10, 0)))
    ids = regions.locate(DRAM, table((100, 50, 0), (199, 1, 0), (300, 10, 1), (2**64 - 1, 1, 0)))
    assert len(set(ids.tolist())) == 4
    for row in [
        (140, 20, 0),  # across two neighbouring registrations
        (99, 1, 0),
        (200, 1, 0),
        (300, 10, 0),  # the other device
        (150, 51, 0),
        (150, 2**64 - 1, 0),
        (2**64 - 10, 11, 0),
    ]:
        with pytest.raises(nixlNotFoundError):
            regions.locate(DRAM, table(row))
    with pytest.raises(nixlNotFoundError):
        regions.locate(nixl_mem_t.VRAM_SEG, table((100, 1, 0)))


def test_overlapping_regions() -> None:
    regions = RegionTable()
    regions.add(DRAM, table((100, 100, 0), (120, 10, 0), (125, 3, 0)))
    large, small, _ = (region.id for region in regions.snapshot())
    assert regions.locate(DRAM, table((126, 60, 0), (121, 9, 0))).tolist() == [large, small]
    with pytest.raises(nixlNotFoundError):
        regions.locate(DRAM, table((126, 75, 0)))


def test_what_a_transfer_uses_stays_registered() -> None:
    regions = RegionTable()
    regions.add(DRAM, table((100, 50, 0)))
    (id,) = (region.id for region in regions.snapshot())
    addresses, lengths = np.array([110, 140], np.uint64), np.array([5, 10], np.uint64)
    regions.admit([id], addresses, lengths)
    regions.admit([id], addresses, lengths)
    for _ in range(2):
        with pytest.raises(nixlNotAllowedError):
            regions.remove(DRAM, table((100, 50, 0)))
        regions.release([id])
    with pytest.raises(nixlNotFoundError):
        regions.admit([id], addresses, lengths + np.uint64(1))
    regions.remove(DRAM, table((100, 50, 0)))
    with pytest.raises(nixlNotFoundError):
        regions.admit([id], addresses, lengths)
    regions.add(DRAM, table((100, 50, 0)))
    with pytest.raises(nixlNotFoundError):
        regions.admit([id], addresses, lengths)


def test_a_transfer_uses_memory_of_one_place() -> None:
    regions = RegionTable()
    regions.add(DRAM, table((100, 50, 0), (200, 50, 3)))
    regions.add(nixl_mem_t.VRAM_SEG, table((300, 50, 1)))
    host, other, device = (region.id for region in regions.snapshot())
    pieces = np.array([110, 210], np.uint64), np.array([5, 10], np.uint64)
    assert regions.admit([host, other, host], *pieces) == HOST
    assert regions.busy() == 3
    regions.release([host, other, host])
    here = np.array([110, 310], np.uint64), np.array([5, 10], np.uint64)
    with pytest.raises(nixlNotFoundError, match="one place"):
        regions.admit([host, device], *here)
    assert not regions.busy()


def announcement(addresses: bytes, lengths: bytes, uniform: int) -> Post:
    return Post(1, 1, [1], addresses, lengths, uniform, 1, None)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 6, 7], []])
def test_announced_runs_come_back(lengths: list[int]) -> None:
    addresses = np.arange(len(lengths)).astype(np.uint64)
    packed = pack_runs(addresses, np.array(lengths, np.uint64))
    assert (len(packed[1]) == 0) == (len(set(lengths)) <= 1)
    got = unpack_runs(announcement(*packed))
    assert got[0].tolist() == addresses.tolist()
    assert got[1].tolist() == lengths


def test_impossible_announcements_are_refused() -> None:
    one = np.ones(1, np.uint64).tobytes()
    for addresses, lengths, uniform in [
        (one[:-1], b"", 1),
        (one, one[:-1], 0),
        (one, b"", 0),
        (one, one + one, 0),
        (one, np.zeros(1, np.uint64).tobytes(), 0),
        (one, np.full(1, 2**63, np.uint64).tobytes(), 0),
        (one, b"", -1),
        (one, b"", 2**60),
        (one * 5, np.full(5, 2**42, np.uint64).tobytes(), 0),
        (one * 4, np.full(4, 2**62, np.uint64).tobytes(), 0),
    ]:
        with pytest.raises(ProtocolError):
            unpack_runs(announcement(addresses, lengths, uniform))
