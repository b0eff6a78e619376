"""`pd-cluster simulate`: from its options to runs, and from figures to what is printed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pd_cluster.coordinator.placement import RouteLimits
from pd_cluster.errors import ConfigError
from pd_cluster.simulate.cluster import ClusterShape
from pd_cluster.simulate.figures import Figures, Slo
from pd_cluster.simulate.hardware import StepTimes, load_hardware, load_model
from pd_cluster.simulate.runs import Experiment, check, check_routes, compare, plan
from pd_cluster.simulate.trace import TraceRequest, conversations, read_trace, scale

ROUTES = ("remote", "remote+pull", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options, as given. `trace` None: `num_conversations` generated ones."""

    trace: Path | None = None
    num_conversations: int = 300
    rate: int = 1
    seconds: float = float("inf")
    prefill: int = 8
    decode: int = 8
    pages: int = 6250
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


def simulate(options: Options) -> int:
    """Runs and prints; 1 if a target of `--check` was missed. ConfigError for bad options."""
    experiment = _experiment(options)
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
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(found, indent=2) + "\n")
    return code


def _experiment(options: Options) -> Experiment:
    wanted = options.routes.split(",")
    unknown = set(wanted) - set(ROUTES)
    if unknown or "remote" not in wanted:
        raise ConfigError(f"--routes {options.routes}: 'remote' and any of {', '.join(ROUTES)}")
    return Experiment(
        trace=_trace(options),
        shape=ClusterShape(
            prefill=options.prefill,
            decode=options.decode,
            num_pages=options.pages,
            page_size=options.page_size,
            max_running=options.max_running_requests,
            chunk_tokens=options.chunked_prefill_size,
        ),
        times=StepTimes(load_hardware(options.hardware), load_model(options.model)),
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
