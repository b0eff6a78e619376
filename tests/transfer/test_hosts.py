"""Between hosts: two network namespaces, joined by nothing but a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pd_transfer import bench
from tests.transfer.conftest import SECRET
from tests.transfer.node import RemoteNode, eventually

MIB = 1 << 20
ADDRESSES = ("10.79.0.1", "10.79.0.2")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Prefixes of commands that are to run on either host."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"pdt{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            stack.callback(_ip, "netns", "del", name)
        ends = [f"v{os.getpid()}{side}" for side in "ab"]
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth",
            "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]


TCP = {"TLS": "tcp,self"}


def test_pages_move_between_hosts(later: Callable[[Any], Any], hosts: list[list[str]]) -> None:
    i, t = (
        later(
            RemoteNode(
                prefix,
                name=name,
                secret=SECRET,
                options={"host": address, "transport": "network", "settings": TCP},
                pages=24,
                page=MIB,
                seed=seed,
            )
        )
        for seed, (name, prefix, address) in enumerate(zip("it", hosts, ADDRESSES, strict=True))
    )
    i.add(t.metadata())
    i.write_everything("t", t.address(), 24 * MIB)
    eventually(lambda: i.counters()["transfers_done"] == 1)
    assert t.digest() == i.digest()
    t.add(i.metadata())
    t.send("i", b"back")
    assert eventually(i.notifications) == {"t": [b"back"]}
    t.kill()
    eventually(lambda: i.state("t") == "dead")
    assert i.quiet("t")
    i.deregister()


def test_the_bench_measures_between_hosts(hosts: list[list[str]]) -> None:
    figures = bench.run(
        [65536],
        total=MIB,
        repeats=1,
        round_trips=10,
        options={"transport": "network", "settings": TCP, "hosts": ADDRESSES},
        environment={"UCX_TLS": "tcp,self"},
        prefixes=(hosts[0], hosts[1]),
    )
    assert figures["write.scattered.65536.ours_gbps"] > 0
