"""Speed between two processes of one host: ours, the `nixl` wheel and memcpy, in one run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pd_transfer.bench_hosts import ADDRESSES, two_hosts
from pd_transfer.bench_node import orders
from pd_transfer.bench_pair import Pair

logger: Final = logging.getLogger("pd_transfer")

KIB: Final = 1024
DEFAULT_SIZES: Final = (16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 16 * 1024 * KIB)
# One token's KV of SmolLM2-135M in bfloat16: a page of page_size 1.
PAGE: Final = 23_040
# Repeats of a contender's turn, and those before them that do not count.
_TURN: Final = 10
_WARM_UP: Final = 1


def run(
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    total: int = 256 * 1024 * KIB,
    repeats: int = 50,
    round_trips: int = 300,
    seed: int = 0,
    nixl_python: str | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    prefixes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> dict[str, float]:
    """Measure WRITE and READ of `total` bytes in pieces of each size, and one page's round trip.

    Contiguous pieces follow each other on both sides, scattered ones lie in unrelated orders.
    A measurement is from making the handle out of prepared lists to "DONE", by NIXL's API on both
    libraries. Contenders take turns of a few repeats; NIXL takes part twice, so that the spread of
    its ratio to itself is the run's own noise. Whose turn it is not is stopped meanwhile (SIGSTOP),
    for NIXL's threads poll; a turn begins with repeats that do not count, for a process that has
    just been woken is slow. Speeds are 90th percentiles.

    Args:
        sizes: bytes of a piece.
        total: bytes of a transfer and of either side's memory.
        repeats: of each figure.
        round_trips: single pages written, with a notification.
        nixl_python: an interpreter that has `nixl_cu12`; else the environment's `PD_NIXL_PYTHON`;
            else this one if it has; else NIXL is left out.
        options: of `pd_transfer.ucx.UcxOptions`, for both sides. Besides, ``hosts``, the addresses
            of both; then a plain TCP socket takes part too, ``tcp_gbps``, and ``tcp_ratio``, ours
            by it.
        environment: for all processes, e.g. ``{"UCX_TLS": "tcp,self"}``.
        prefixes: commands that start the initiator and the target elsewhere, e.g. in a network
            namespace.

    Returns:
        By ``<write|read>.<contiguous|scattered>.<size>.``: ``ours_gbps``, ``nixl_gbps``,
        ``memcpy_gbps`` in GB/s; ``ours_cpu_s_per_gb`` and ``nixl_cpu_s_per_gb``, the CPU time of
        both sides together, which other load on the machine disturbs least; ``nixl_ratio`` (ours
        by NIXL's), ``nixl_ratio_median`` of the paired ratios with its 95 % interval ``_low``,
        ``_high``, and the same of NIXL with itself, ``noise_ratio...``. Besides,
        ``write.<order>.262144.busy_ratio``: with the target's main thread in matrix products, by
        idle; ``roundtrip_us``, ``roundtrip_p99_us``, ``nixl_roundtrip_us``, and
        ``socket_roundtrip_us``, the same page and answer by plain sockets and as many threads;
        ``post_10000_us``.
        What needs NIXL is absent without it.
    """
    nixl_python = nixl_python or os.environ.get("PD_NIXL_PYTHON")
    if nixl_python is None and importlib.util.find_spec("nixl_cu12"):
        nixl_python = sys.executable
    if nixl_python is None:
        logger.warning("nixl_cu12 is not installed: measuring without it")
    figures: dict[str, float] = {}
    with ExitStack() as stack:

        def pair(library: str, python: str) -> Pair:
            return stack.enter_context(
                Pair(library, python, total, dict(options or {}), environment, prefixes)
            )

        ours = pair("ours", sys.executable)
        contenders: dict[str, Any] = {"ours": ours.move}
        nixl, pairs = None, {"ours": ours}
        if nixl_python is not None:
            nixl = pair("nixl", nixl_python)
            pairs["nixl"] = nixl
            contenders |= {"nixl": nixl.move, "again": nixl.move}
        if "hosts" in (options or {}):
            pairs["tcp"] = pair("tcp", sys.executable)
            contenders["tcp"] = pairs["tcp"].move
        memcpy = _Memcpy(total)
        contenders["memcpy"] = memcpy.move
        for size in sizes:
            for order in ("contiguous", "scattered"):
                for operation in ("WRITE", "READ"):
                    name = f"{operation.lower()}.{order}.{size}"
                    case = (operation, size, order)
                    figures |= _compare(name, case, contenders, pairs, total, repeats, seed)
            memcpy.forget()
        for order in ("contiguous", "scattered"):
            figures |= _busy(ours, order, min(256 * KIB, total), repeats)
        echo = pair("echo", sys.executable)
        figures |= _round_trips(ours, nixl, echo, round_trips)
        count = min(10_000, total // (16 * KIB))
        with ours.running():
            posts = ours.initiator.call("post", 16 * KIB, count, 5)
        figures["post_10000_us"] = float(np.median(posts)) * 1e6
    return figures


def between_hosts(sizes: Sequence[int] = DEFAULT_SIZES, **shape: Any) -> dict[str, float]:
    """The same between two network namespaces of this machine, over tcp, beside a plain socket.

    Args:
        shape: of `run`.

    Raises:
        NoNamespaces: they need root and iproute2.
    """
    with two_hosts() as prefixes:
        return run(
            sizes,
            options={"transport": "network", "settings": {"TLS": "tcp,self"}, "hosts": ADDRESSES},
            environment={"UCX_TLS": "tcp,self"},
            prefixes=prefixes,
            **shape,
        )


def _compare(
    name: str,
    case: tuple[str, int, str],
    contenders: Mapping[str, Any],
    pairs: Mapping[str, Pair],
    total: int,
    repeats: int,
    seed: int,
) -> dict[str, float]:
    operation, size, order = case
    moved = total // size * size
    speeds: dict[str, list[float]] = {who: [] for who in contenders}
    for who in contenders:  # page tables, caches and connections are not what is measured
        contenders[who](operation, size, order, seed)
    before = {who: pair.cpu() for who, pair in pairs.items()}
    turns = list(contenders)
    rng = np.random.default_rng(seed)
    for done in range(0, repeats, _TURN):
        count = min(_TURN, repeats - done)
        for turn in rng.permutation(len(turns)):
            who = turns[turn]
            if who == "memcpy" and done:
                continue  # one turn tells, and it is among the slower ones
            seconds = contenders[who](operation, size, order, seed, _WARM_UP + count)
            speeds[who] += [moved / each / 1e9 for each in seconds[_WARM_UP:]]
    figures = {
        f"{name}.{who}_gbps": float(np.percentile(values, 90))
        for who, values in speeds.items()
        if who != "again"
    }
    for who, pair in pairs.items():
        moves = sum(_WARM_UP + min(_TURN, repeats - done) for done in range(0, repeats, _TURN))
        moves *= 2 if who == "nixl" else 1
        figures[f"{name}.{who}_cpu_s_per_gb"] = (pair.cpu() - before[who]) / moves / moved * 1e9
    if "tcp" in speeds:
        figures |= _ratio(f"{name}.tcp_ratio", speeds["ours"], speeds["tcp"])
    if "nixl" in speeds:
        figures |= _ratio(f"{name}.nixl_ratio", speeds["ours"], speeds["nixl"])
        figures |= _ratio(f"{name}.noise_ratio", speeds["again"], speeds["nixl"])
    return figures


def _ratio(name: str, mine: list[float], theirs: list[float]) -> dict[str, float]:
    paired = np.sort(np.array(mine) / np.array(theirs))
    # The median's distribution-free interval: ranks from the normal approximation of a binomial.
    half = 0.98 * len(paired) ** 0.5
    low = max(0, int(len(paired) / 2 - half))
    high = min(len(paired) - 1, int(len(paired) / 2 + half))
    return {
        name: float(np.percentile(mine, 90) / np.percentile(theirs, 90)),
        f"{name}_median": float(np.median(paired)),
        f"{name}_low": float(paired[low]),
        f"{name}_high": float(paired[high]),
    }


def _busy(ours: Pair, order: str, size: int, repeats: int) -> dict[str, float]:
    idle, busy = [], []
    for _ in range(repeats):
        with ours.running():
            idle += ours.initiator.call("move", "WRITE", size, order, 1, 1)
            ours.target.call("burn", True)
            busy += ours.initiator.call("move", "WRITE", size, order, 1, 1)
            ours.target.call("burn", False)
    ratio = np.percentile(idle, 10) / np.percentile(busy, 10)
    return {f"write.{order}.{size}.busy_ratio": float(ratio)}


def _round_trips(ours: Pair, nixl: Pair | None, echo: Pair, count: int) -> dict[str, float]:
    contenders = {"": ours, "socket_": echo} | ({"nixl_": nixl} if nixl else {})
    trips: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(10):
        for who, pair in contenders.items():
            with pair.running():
                trips[who] += pair.initiator.call("trips", PAGE, max(1, count // 10))
                pair.target.call("drain")
    figures = {f"{who}roundtrip_us": float(np.median(t)) * 1e6 for who, t in trips.items()}
    figures["roundtrip_p99_us"] = float(np.percentile(trips[""], 99)) * 1e6
    return figures


class _Memcpy:
    """The same pieces inside one process, between warm memory; contiguous ones in one go."""

    def __init__(self, total: int) -> None:
        self._source, self._target = (np.full(total, n, np.uint8) for n in (1, 0))
        self._orders: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def forget(self) -> None:
        self._orders.clear()

    def move(
        self, operation: str, size: int, order: str, seed: int, repeats: int = 1
    ) -> list[float]:
        return [self._once(size, order, seed) for _ in range(repeats)]

    def _once(self, size: int, order: str, seed: int) -> float:
        count = len(self._source) // size
        source = self._source[: count * size].reshape(count, size)
        target = self._target[: count * size].reshape(count, size)
        if order not in self._orders:
            self._orders[order] = orders(order, count, seed)
        local, remote = self._orders[order]
        start = time.perf_counter()
        if order == "contiguous":
            np.copyto(target, source)
        else:
            target[remote] = source[local]
        return time.perf_counter() - start


_IN_THE_TABLE: Final = ("nixl_ratio", "noise_ratio", "tcp_ratio")


def summary(figures: Mapping[str, float]) -> str:
    """A table, a line a case: speeds, and ours by NIXL's beside NIXL's by its own."""
    rows = [
        f"{'GB/s, 90th percentiles':30}{'ours':>8}{'NIXL':>8}{'memcpy':>8}{'socket':>8}"
        f"{'ours/socket':>13}{'ours/NIXL':>11}{'paired median [95 %]':>24}"
        f"{'NIXL/itself [95 %]':>24}"
    ]
    for name in figures:
        case, _, figure = name.rpartition(".")
        if figure != "ours_gbps":
            continue
        speeds = [figures.get(f"{case}.{who}_gbps") for who in ("ours", "nixl", "memcpy", "tcp")]
        row = f"{case:30}" + "".join(f"{x:8.2f}" if x is not None else f"{'-':>8}" for x in speeds)
        socket = figures.get(f"{case}.tcp_ratio")
        row += f"{socket:13.2f}" if socket is not None else f"{'-':>13}"
        if f"{case}.nixl_ratio" in figures:
            row += f"{figures[f'{case}.nixl_ratio']:11.2f}"
            for ratio in ("nixl_ratio", "noise_ratio"):
                middle, low, high = (
                    figures[f"{case}.{ratio}_{end}"] for end in ("median", "low", "high")
                )
                row += f"{f'{middle:.2f} [{low:.2f}, {high:.2f}]':>24}"
        rows.append(row)
    return "\n".join(rows)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(DEFAULT_SIZES))
    parser.add_argument("--mib", type=int, default=256, help="of a transfer")
    parser.add_argument("--round-trips", type=int, default=300)
    parser.add_argument(
        "--namespaces",
        action="store_true",
        help="between two network namespaces, over tcp (root)",
    )
    parser.add_argument("--nixl-python", help="an interpreter that has nixl_cu12")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    figures = (between_hosts if given.namespaces else run)(
        given.sizes,
        total=given.mib * 1024 * KIB,
        repeats=given.repeats,
        round_trips=given.round_trips,
        nixl_python=given.nixl_python,
    )
    for name, value in figures.items():
        if not any(
            part in name for part in ("_gbps", "ratio_", "nixl_ratio", "noise_ratio", "tcp_ratio")
        ):
            print(f"{name:52} {value:10.3f}")
    print(summary(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
