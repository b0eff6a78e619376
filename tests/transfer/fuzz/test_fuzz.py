"""Control messages from nowhere: ten minutes of coverage-guided fuzzing, and a sample of it."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pd_transfer import metadata
from pd_transfer.errors import nixlMismatchError
from pd_transfer.messages import Post, ProtocolError, decode, encode
from pd_transfer.metadata import VERSION, Metadata
from pd_transfer.regions import Region
from tests.transfer.fuzz.corpus import seeds
from tests.transfer.fuzz.harness import Do, Scene, peer, play, step, victim


@pytest.fixture(scope="module")
def spoken() -> list[bytes]:
    return seeds()


def test_conversations_are_played_as_they_were(spoken: list[bytes]) -> None:
    """Else the fuzzer would begin with nothing: bytes land where a real peer's had landed."""
    scenes = {Scene(seed[0]) for seed in spoken}
    assert scenes == set(Scene)
    for place in victim.regions:
        np.asarray(_bytes(place))[:] = 0
    np.asarray(_bytes(peer.regions[1]))[:] = 7
    for seed in spoken:
        if seed[0] == Scene.SERVING:
            play(seed)
    assert _bytes(victim.regions[0])[:100].tolist() == [7] * 100
    for seed in spoken:
        play(seed)


def _bytes(address: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    from pd_transfer.runs import view

    return view(address, victim.REGION)


def test_a_write_beside_the_regions_is_noticed() -> None:
    place = victim.regions[0] - 8
    before = int(_bytes(place)[0])
    try:
        _bytes(place)[0] = before ^ 1
        with pytest.raises(AssertionError, match="outside"):
            play(bytes([Scene.SERVING]))
    finally:
        _bytes(place)[0] = before


@pytest.mark.parametrize("scene", [Scene.SERVING, Scene.SERVING_TCP])
@pytest.mark.parametrize("operation", [0, 1])
def test_a_refused_transfer_costs_nothing_however_long_it_claims_to_be(
    scene: Scene, operation: int
) -> None:
    """Found by the fuzzer: the plan for 4 TiB took the agent's thread seconds."""
    address = np.array([victim.regions[0]], "<u8").tobytes()
    post = Post(1, operation, [99], address, b"", 1 << 42, 1, None, address)
    seen: list[int] = []

    def count(frame: object, event: str, argument: object) -> None:
        seen.append(1)

    sys.setprofile(count)
    try:
        play(bytes([scene]) + step(Do.FRAME, encode(post)))
    finally:
        sys.setprofile(None)
    assert len(seen) < 10_000  # calls; one a message would be a million


@pytest.mark.parametrize("id", [-1, 1 << 40])
def test_no_transfer_has_a_number_that_a_wire_cannot_say(id: int) -> None:
    """Found by the fuzzer: the read's first message could not be named, and its link hung."""
    address = np.array([victim.regions[0]], "<u8").tobytes()
    post = Post(id, 1, [1], address, b"", 100, 1, None, address)
    play(bytes([Scene.SERVING_TCP]) + step(Do.FRAME, encode(post)))
    with pytest.raises(ProtocolError):
        decode(encode(post))


@pytest.mark.parametrize(
    "region",
    [(-1, 1, 0, 9, 0), (1, 1, -9, 9, 0), (1, 1, 0, -1, 0), (1, 1, 0, 9, -1), (1 << 63, 1, 0, 9, 0)],
)
def test_metadata_of_impossible_memory_is_damaged(region: tuple[int, ...]) -> None:
    """Found by the fuzzer: two regions, one of them -1 bytes long, were a bare OverflowError."""
    whole = Metadata(VERSION, "peer", b"g" * 16, "UCX", None, [Region(*region)])
    with pytest.raises(nixlMismatchError, match="damaged metadata"):
        metadata.decode(metadata.encode(whole))


def test_damaged_conversations(spoken: list[bytes]) -> None:
    rng = random.Random(5)
    for _ in range(300):
        torn = bytearray(rng.choice(spoken))
        for _ in range(rng.randrange(1, 4)):
            torn[rng.randrange(min(len(torn), 400))] = rng.randrange(256)
        play(bytes(torn))


@pytest.fixture
def folders(tmp_path: Path, spoken: list[bytes]) -> tuple[Path, Path]:
    found, given = tmp_path / "found", tmp_path / "seeds"
    found.mkdir()
    given.mkdir()
    for number, seed in enumerate(spoken):
        (given / f"{number:03}").write_bytes(seed)
    return found, given


@pytest.mark.parametrize(
    "limit",
    [
        "-runs=1000",
        pytest.param("-max_total_time=600", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_coverage_guided(folders: tuple[Path, Path], tmp_path: Path, limit: str) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: it has no wheel for every Python")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.transfer.fuzz.target", limit, "-seed=1"),
            *("-max_len=30000", "-timeout=60", f"-artifact_prefix={tmp_path}/"),
            *map(str, folders),
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    told = ended.stderr.splitlines()
    assert ended.returncode == 0, "\n".join(told[-60:])
    print(*[line for line in told if "DONE" in line or line.startswith("Done")], sep="\n")
