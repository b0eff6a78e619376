"""Commands beside serving: chat, bench, simulate, and models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_cluster import operations
from pd_cluster.bench import runner
from pd_cluster.bench.runner import BenchName
from pd_cluster.cli.common import ClusterName, console


def chat(
    cluster_name: ClusterName = "pd",
    url: Annotated[str | None, typer.Option(help="A server's address, instead.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PD_API_KEY", help="Bearer key.")] = None,
) -> None:
    """Talk to the model; each turn shows its cached tokens, first-token time and speed."""
    from pd_cluster.chat import Chat, open_chat, talk

    address = url or operations.served(cluster_name).url
    conversation: Chat = open_chat(
        address, system=system, temperature=temperature, max_tokens=max_tokens, api_key=api_key
    )
    talk(conversation, Console(highlight=False))


def bench(
    name: Annotated[BenchName, typer.Argument(help="What to measure.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures there, as one flat object.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server, for prefix; else one is started.")
    ] = None,
) -> None:
    """Measure a part on this machine; docs/performance.md tells what the figures mean."""
    if json_file is not None:
        runner.check_writable(json_file)
    with console.status(f"bench {name}"):
        figures = runner.run(name, url)
    if json_file is not None:
        runner.write_json(json_file, figures)
    runner.report(name, figures, Console())


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(help="Mooncake's JSON lines or Azure's CSV; else conversations."),
    ] = None,
    num_conversations: Annotated[int, typer.Option(help="To generate, without --trace.")] = 300,
    rate: Annotated[int, typer.Option(help="Times the trace's arrival rate.")] = 1,
    seconds: Annotated[float, typer.Option(help="Of the trace, from its start.")] = float("inf"),
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 8,
    pages: Annotated[
        int | None, typer.Option(help="KV pages of each worker; else what its memory has room for.")
    ] = None,
    host_pages: Annotated[int, typer.Option(help="Of each worker's host tier; 0: none.")] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens of a KV page.")] = 512,
    hardware: Annotated[str, typer.Option(help="h200, h100, a100 or a YAML file.")] = "h100",
    model: Annotated[str, typer.Option(help="A known shape or a config.json.")] = "llama-3.1-8b",
    placement: Annotated[str, typer.Option(help="Placement policy.")] = "cost",
    schedule_policy: Annotated[str, typer.Option(help="Order of the queue.")] = "fcfs",
    routes: Annotated[str, typer.Option(help="That may be taken.")] = "remote,remote+pull,local",
    chunked_prefill_size: Annotated[int, typer.Option(help="Prompt tokens in a step.")] = 8192,
    max_running_requests: Annotated[int, typer.Option(help="On one decode worker.")] = 256,
    ttft: Annotated[float, typer.Option(help="SLO of the first token, seconds.")] = 2.0,
    itl: Annotated[float, typer.Option(help="SLO between tokens, seconds.")] = 0.05,
    seed: int = 0,
    compare: Annotated[str | None, typer.Option(help="Policies, with commas.")] = None,
    check: Annotated[bool, typer.Option(help="Exit code 1 if a target is missed.")] = False,
    plan: Annotated[bool, typer.Option(help="Find the smallest cluster for the SLO.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the run, or those of --compare (extra: plot).")
    ] = None,
) -> None:
    """Run the schedulers in virtual time over a trace, at any size."""
    from pd_cluster.simulate.command import Options
    from pd_cluster.simulate.command import simulate as run

    options = Options(
        trace=trace,
        num_conversations=num_conversations,
        rate=rate,
        seconds=seconds,
        prefill=prefill,
        decode=decode,
        pages=pages,
        host_pages=host_pages,
        page_size=page_size,
        hardware=hardware,
        model=model,
        placement=placement,
        schedule_policy=schedule_policy,
        routes=routes,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running_requests,
        ttft=ttft,
        itl=itl,
        seed=seed,
        compare=compare,
        check=check,
        plan=plan,
        json_file=json_file,
        plot=plot,
    )
    if json_file is not None:
        runner.check_writable(json_file)
    raise typer.Exit(run(options))


def model_pull(name: Annotated[str, typer.Argument(help="A known name, e.g. smollm2.")]) -> None:
    """Fetch a model into the user's cache, once, and print its folder."""
    from pd_cluster.model.store import resolve_model

    print(resolve_model(name))


def model_list() -> None:
    """The known models, and the folders in the cache."""
    from pd_cluster.model.store import known_models, models_dir

    for name in known_models():
        print(name)
    folder = models_dir()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir():
            print(path)
