"""Runs as a picture: how first tokens and gaps between tokens are spread, and what caches saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pd_cluster.errors import ConfigError
from pd_cluster.simulate.cluster import Simulation

# Points of a curve: a trace has millions of gaps, which need not be kept for a line.
POINTS = 400


@dataclass(frozen=True, slots=True)
class Curves:
    """One run: quantiles 0 to 1 in even steps, in seconds, and hit rates by name."""

    ttft: NDArray[np.float64]
    itl: NDArray[np.float64]
    rates: dict[str, float]

    @classmethod
    def of(cls, simulation: Simulation) -> Curves:
        at = np.linspace(0, 1, POINTS)
        served = [request for request in simulation.requests if not request.rejected]
        ttft = [request.first_token - request.arrival for request in served]
        gaps = np.frombuffer(simulation.gaps, np.float64) if simulation.gaps else np.zeros(1)
        prompt = sum(request.trace.prompt_len for request in served)
        held = {
            "prefill hit": sum(request.sources.prefill_hit for request in served),
            "pulled": sum(request.sources.pulled for request in served),
            "on decode": sum(request.resident for request in served),
        }
        rates = {name: tokens / prompt for name, tokens in held.items()}
        return cls(np.quantile(ttft, at), np.quantile(gaps, at), rates)


def check_drawable(path: Path) -> None:
    """ConfigError before a long simulation where its picture could not be drawn or written."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'pd-cluster[plot]'") from error
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"--plot {path}: unknown kind of picture; known: {', '.join(kinds)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: no such folder")


def draw(curves: dict[str, Curves], path: Path) -> None:
    """Writes the runs, by their names, as one picture of the kind that the suffix says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    first, between, caches = figure.subplots(1, 3)
    part = np.linspace(0, 1, POINTS)
    for axes, title in ((first, "time to first token"), (between, "time between tokens")):
        axes.set(title=title, xlabel="seconds", ylabel="part of all", xscale="log", ylim=(0, 1))
        axes.grid(alpha=0.3)
    for name, run in curves.items():
        first.plot(run.ttft, part, label=name)
        between.plot(run.itl, part, label=name)
    first.legend()
    width = 0.8 / len(curves)
    for index, (name, run) in enumerate(curves.items()):
        positions = np.arange(len(run.rates)) + index * width
        caches.bar(positions, list(run.rates.values()), width, label=name)
    names = list(next(iter(curves.values())).rates)
    caches.set(title="prompt tokens found in caches", ylabel="part of all")
    caches.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names)
    figure.savefig(path)
