"""Between hosts: two network namespaces, joined by nothing but a virtual cable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_transfer import bench
from pd_transfer.bench_hosts import ADDRESSES, NoNamespaces
from tests.transfer.conftest import SECRET
from tests.transfer.node import RemoteNode, eventually

MIB = 1 << 20
TCP = {"TLS": "tcp,self"}


def test_pages_move_between_hosts(
    later: Callable[[Any], Any], hosts: tuple[list[str], list[str]]
) -> None:
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


def test_the_bench_measures_between_hosts() -> None:
    try:
        figures = bench.between_hosts([65536], total=MIB, repeats=1, round_trips=10)
    except NoNamespaces as reason:
        pytest.skip(str(reason))
    assert figures["write.scattered.65536.ours_gbps"] > 0
    assert figures["write.scattered.65536.tcp_ratio"] > 0
    header, first, *_ = bench.summary(figures).splitlines()
    assert "ours/socket" in header
    assert f"{figures['write.contiguous.65536.tcp_ratio']:.2f}" in first
