"""The benches by name: `pd-cluster bench NAME`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pd_cluster.errors import ConfigError


class BenchName(StrEnum):
    PREFIX = "prefix"
    LAYOUT = "layout"
    TRANSFER = "transfer"
    CACHE = "cache"
    TIERS = "tiers"
    KERNELS = "kernels"
    OVERHEAD = "overhead"
    IDLE = "idle"
    PLACEMENT = "placement"
    ROUTES = "routes"
    SIMULATION = "simulation"


def run(name: BenchName, url: str | None = None) -> dict[str, float]:
    """The figures of one bench by dotted names; docs/performance.md says what each means.

    `url` is a running server for the prefix bench, in place of a cluster of its own. Raises
    ConfigError for a `url` with any other bench.
    """
    if url is not None and name is not BenchName.PREFIX:
        raise ConfigError(f"--url: bench {name} asks no server; only prefix does")
    # Imported late: each bench brings libraries that the others do without.
    match name:
        case BenchName.PREFIX:
            from pd_cluster.bench import prefix

            return prefix.run(url)
        case BenchName.LAYOUT:
            from pd_cluster.bench import layout

            return layout.run()
        case BenchName.OVERHEAD:
            from pd_cluster.bench import overhead

            return overhead.run()
        case BenchName.IDLE:
            from pd_cluster.bench import idle

            return idle.run()
        case BenchName.PLACEMENT:
            from pd_cluster.bench import placement

            return placement.run()
        case BenchName.ROUTES:
            from pd_cluster.bench import routes

            return routes.run()
        case BenchName.SIMULATION:
            from pd_cluster.bench import simulation

            return simulation.run()
        case BenchName.TRANSFER:
            from pd_transfer import bench as transfer

            return name_transfer(transfer.run())
        case BenchName.CACHE:
            from pd_cluster.bench import cache

            return cache.run()
        case BenchName.TIERS:
            from pd_cluster.bench import tiers

            return tiers.run()
        case BenchName.KERNELS:
            from pd_kernels import bench as kernels

            return name_kernels(kernels.run(seconds_each=0.2))


def name_transfer(figures: dict[str, float]) -> dict[str, float]:
    """`pd_transfer.bench`'s figures by published names, with the ratio to memcpy beside each."""
    named = {f"transfer.{name}": value for name, value in figures.items()}
    for name, value in figures.items():
        if name.endswith(".ours_gbps"):
            case = name.removesuffix(".ours_gbps")
            named[f"transfer.{case}.ratio"] = value / figures[f"{case}.memcpy_gbps"]
    return dict(sorted(named.items(), key=lambda item: _natural(item[0])))


def name_kernels(figures: dict[str, float]) -> dict[str, float]:
    """`pd_kernels.bench`'s figures by published names, with ours by torch's time beside them."""
    named: dict[str, float] = {}
    for name, value in figures.items():
        named[f"kernels.{name}_us"] = value
        case, _, side = name.rpartition(".")
        if side == "torch":
            named[f"kernels.{case}.ratio"] = figures[f"{case}.ours"] / value
    return named


def report(name: BenchName, figures: dict[str, float], console: Console) -> None:
    """Prints a table of the figures, and what they say where a bench concludes anything."""
    table = Table(title=f"bench {name}", box=box.SIMPLE)
    # Names are for copying: never cut short.
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for key, value in figures.items():
        unit = unit_of(key)
        style = "bold" if unit == "ratio" else ""
        digits = 0 if unit == "bytes" else 3 if value < 100 else 1
        table.add_row(key, f"{value:,.{digits}f}", unit, style=style)
    console.print(table)
    for line in _conclusions(name, figures):
        console.print(line, markup=False, soft_wrap=True)


def unit_of(figure: str) -> str:
    """The unit that a figure's name tells."""
    last = figure.rpartition(".")[2]
    if "ratio" in figure.split(".") or last.endswith("ratio"):
        return "ratio"
    if "bytes" in last.split("_"):
        return "bytes"
    if last.endswith("percent"):
        return "%"
    units = {"us": "us", "ms": "ms", "s": "s", "gbps": "GB/s", "percent": "%"}
    return units.get(last.rpartition("_")[2], "")


def check_writable(path: Path) -> None:
    """Raises ConfigError where `write_json` could not write, before a bench takes its minutes."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: cannot be written")


def write_json(path: Path, figures: dict[str, float]) -> None:
    """One flat object."""
    path.write_text(json.dumps(figures, indent=2) + "\n")


def _conclusions(name: BenchName, figures: dict[str, float]) -> list[str]:
    if name is BenchName.PREFIX:
        from pd_cluster.bench import prefix

        return prefix.conclusions(figures)
    if name is BenchName.LAYOUT:
        from pd_cluster.bench import layout

        return layout.conclusions(figures)
    if name is BenchName.TIERS:
        from pd_cluster.bench import tiers

        return tiers.conclusions(figures)
    if name is BenchName.SIMULATION:
        from pd_cluster.bench import simulation

        return simulation.conclusions(figures)
    return []


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts sizes by number."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
