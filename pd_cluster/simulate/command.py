"""`pd-cluster simulate`: from its options to runs, and from figures to what is printed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from pd_cluster.coordinator.choice import RouteLimits
from pd_cluster.coordinator.index import BLOCK_TOKENS
from pd_cluster.coordinator.queue import make_queue_policy
from pd_cluster.errors import ConfigError
from pd_cluster.simulate.cluster import ClusterShape, Simulation
from pd_cluster.simulate.figures import Figures, Slo
from pd_cluster.simulate.hardware import StepTimes, load_hardware, load_model
from pd_cluster.simulate.plot import Curves, check_drawable, draw
from pd_cluster.simulate.runs import Experiment, check, check_routes, compare, plan
from pd_cluster.simulate.trace import TraceRequest, conversations, read_trace, scale
from pd_cluster.types import Route

ROUTES: tuple[str, ...] = get_args(Route)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options, as given. `trace` None: `num_conversations` generated ones; `pages`
    None: what the hardware's memory has room for beside the weights; `host_pages` 0: no host tier.
    """

    trace: Path | None = None
    num_conversations: int = 300
    rate: int = 1
    seconds: float = float("inf")
    prefill: int = 8
    decode: int = 8
    pages: int | None = None
    host_pages: int = 0
    page_size: int = 512
    hardware: str = "h100"
    model: str = "llama-3.1-8b"
    placement: str = "cost"
    schedule_policy: str = "fcfs"
    routes: str = ",".join(ROUTES)
    chunked_prefill_size: int = 8192
    max_running_requests: int = 256
    ttft: float = 2.0
    itl: float = 0.05
    seed: int = 0
    compare: str | None = None
    check: bool = False
    plan: bool = False
    json_file: Path | None = None
    plot: Path | None = None


def simulate(options: Options) -> int:
    """Runs and prints; 1 if a target of `--check` was missed. ConfigError for bad options."""
    _check(options)
    experiment = _experiment(options)
    curves: dict[str, Curves] = {}
    if options.plot is not None:
        check_drawable(options.plot)

        def watch(placement: str, simulation: Simulation) -> None:
            curves[placement] = Curves.of(simulation)

        experiment = replace(experiment, watch=watch)
    console = Console()
    code = 0
    if options.check:
        found, targets = (check if options.trace else check_routes)(experiment)
        _print(console, found)
        for target in targets:
            console.print(str(target), highlight=False)
        code = 0 if all(target.met for target in targets) else 1
    elif options.plan:
        prefill, decode, found = plan(experiment)
        found |= {"plan.prefill": prefill, "plan.decode": decode}
        _print(console, found)
    elif options.compare:
        found = compare(experiment, options.compare.split(","))
        _print(console, found)
    else:
        found = experiment.run(options.placement)
        _print(console, found)
    if options.plot is not None:
        draw(curves, options.plot)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(found, indent=2) + "\n")
    return code


def _check(options: Options) -> None:
    """Raises ConfigError for what contradicts itself or can mean nothing."""
    tasks = {"--check": options.check, "--plan": options.plan, "--compare": options.compare}
    given = [name for name, value in tasks.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: each is a task of its own, give one")
    if options.plot is not None and given not in ([], ["--compare"]):
        raise ConfigError(f"--plot draws one run, or those of --compare, not {given[0]}")
    least = {
        "--prefill": options.prefill,
        "--decode": options.decode,
        "--page-size": options.page_size,
        "--rate": options.rate,
        "--num-conversations": options.num_conversations,
        "--chunked-prefill-size": options.chunked_prefill_size,
        "--max-running-requests": options.max_running_requests,
    }
    for name, value in least.items():
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    if options.host_pages < 0:
        raise ConfigError(f"--host-pages {options.host_pages}: must not be negative")
    if options.trace is None and (options.rate > 1 or options.seconds < float("inf")):
        raise ConfigError("--rate and --seconds are of a --trace, and none is given")
    if max(options.page_size, BLOCK_TOKENS) % options.page_size:
        raise ConfigError(
            f"--page-size {options.page_size}: must divide {BLOCK_TOKENS} or be larger"
        )
    wanted = options.routes.split(",")
    unknown = set(wanted) - set(ROUTES)
    if unknown or "remote" not in wanted:
        raise ConfigError(f"--routes {options.routes}: 'remote' and any of {', '.join(ROUTES)}")
    try:
        make_queue_policy(options.schedule_policy)
    except ValueError as error:
        raise ConfigError(f"--schedule-policy: {error}") from error


def _experiment(options: Options) -> Experiment:
    wanted = options.routes.split(",")
    times = StepTimes(load_hardware(options.hardware), load_model(options.model))
    pages = times.pages(options.page_size) if options.pages is None else options.pages
    if pages < 1:
        raise ConfigError(
            f"{options.model} leaves no memory for a page of {options.page_size} tokens on"
            f" {options.hardware}; give --pages for what it has elsewhere"
        )
    return Experiment(
        trace=_trace(options),
        shape=ClusterShape(
            prefill=options.prefill,
            decode=options.decode,
            num_pages=pages,
            host_pages=options.host_pages,
            page_size=options.page_size,
            max_running=options.max_running_requests,
            chunk_tokens=options.chunked_prefill_size,
        ),
        times=times,
        slo=Slo(options.ttft, options.itl),
        schedule_policy=options.schedule_policy,
        seed=options.seed,
        limits=RouteLimits(pull="remote+pull" in wanted, local="local" in wanted),
        timed=time.perf_counter,
    )


def _trace(options: Options) -> list[TraceRequest]:
    if options.trace is None:
        return conversations(options.num_conversations, options.seed)
    trace = read_trace(options.trace)
    if options.rate > 1:
        trace = scale(trace, options.rate, options.seconds)
    trace = [request for request in trace if request.arrival < options.seconds]
    if not trace:
        raise ConfigError(f"trace {options.trace}: no request in it")
    return trace


def _print(console: Console, found: Figures) -> None:
    """A column for each policy, where names begin with one."""
    columns: dict[str, Figures] = {}
    for name, value in found.items():
        policy, _, figure = name.partition(".")
        if f"{policy}.requests" in found:
            columns.setdefault(policy, {})[figure] = value
        else:
            columns.setdefault("", {})[name] = value
    for policies in ([each for each in columns if each], [""]):
        rows = list(dict.fromkeys(name for each in policies for name in columns.get(each, {})))
        if not rows:
            continue
        table = Table("figure", *policies)
        for name in rows:
            table.add_row(
                name, *(f"{columns[each].get(name, float('nan')):.5g}" for each in policies)
            )
        console.print(table)
