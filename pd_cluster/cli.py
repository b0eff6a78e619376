"""`pd-cluster`: the command line."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live

from pd_cluster import __version__, operations, registry, scale_client
from pd_cluster.bench import runner
from pd_cluster.bench.runner import BenchName
from pd_cluster.config import Config, load_config
from pd_cluster.errors import ConfigError, ModelError, PdClusterError, StartError

app = typer.Typer(
    name="pd-cluster",
    help="Serve one language model with prefill and decode apart, and a radix KV cache on both.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="Fetch and look at models.", no_args_is_help=True)
app.add_typer(model_app, name="model")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pd-cluster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


console = Console(stderr=True, highlight=False)

ClusterName = Annotated[str, typer.Option(help="Which of this user's clusters.")]
AdminKey = Annotated[str | None, typer.Option(envvar="PD_ADMIN_KEY", help="If the server has one.")]
# Options of `serve`, grouped as in --help. A value that is not given is left to the config file.
MODEL, CACHE, LIMITS, CLUSTER = "Model", "KV cache", "Limits", "Cluster"
ACCESS = "Access and logs"
TIERS = "KV cache tiers"
ORDER = "Scheduling"


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; configs/local.yaml if left out.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value; dots reach into sections.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Known name, folder or GGUF file.", rich_help_panel=MODEL)
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name in the API; again for further names.", rich_help_panel=MODEL),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A file, or one of the model's own.", rich_help_panel=MODEL)
    ] = None,
    sampling_defaults: Annotated[
        str | None,
        typer.Option(help="model (its generation_config.json) or openai.", rich_help_panel=MODEL),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32.", rich_help_panel=MODEL)
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens, prompt and answer.", rich_help_panel=MODEL)
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens of a KV page.", rich_help_panel=CACHE)
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="KV pool of each worker.", rich_help_panel=CACHE)
    ] = None,
    radix_eviction_policy: Annotated[
        str | None, typer.Option(help="Which prefixes go first.", rich_help_panel=CACHE)
    ] = None,
    radix_eviction_policy_config: Annotated[
        str | None, typer.Option(help="JSON object for the policy.", rich_help_panel=CACHE)
    ] = None,
    disable_radix_cache: Annotated[
        bool, typer.Option(help="Keep no prefixes.", rich_help_panel=CACHE)
    ] = False,
    radix_cache_backend: Annotated[
        str | None, typer.Option(help="A registered cache, or module:name.", rich_help_panel=CACHE)
    ] = None,
    strip_thinking_cache: Annotated[
        bool, typer.Option(help="Keep prompts, not answers.", rich_help_panel=CACHE)
    ] = False,
    enable_hierarchical_cache: Annotated[
        bool, typer.Option(help="Keep what is evicted in host memory.", rich_help_panel=TIERS)
    ] = False,
    hicache_ratio: Annotated[
        float | None, typer.Option(help="Host memory per KV pool.", rich_help_panel=TIERS)
    ] = None,
    hicache_size: Annotated[
        float | None, typer.Option(help="Host memory in GB.", rich_help_panel=TIERS)
    ] = None,
    hicache_write_policy: Annotated[
        str | None,
        typer.Option(
            help="write_through, write_back, write_through_selective.", rich_help_panel=TIERS
        ),
    ] = None,
    hicache_storage_backend: Annotated[
        str | None, typer.Option(help="file, redis or module:factory.", rich_help_panel=TIERS)
    ] = None,
    hicache_storage_backend_extra_config: Annotated[
        str | None, typer.Option(help="JSON object for the backend.", rich_help_panel=TIERS)
    ] = None,
    hicache_storage_size: Annotated[
        float | None, typer.Option(help="GB of the file backend.", rich_help_panel=TIERS)
    ] = None,
    hicache_storage_prefetch_policy: Annotated[
        str | None,
        typer.Option(help="best_effort, wait_complete, timeout.", rich_help_panel=TIERS),
    ] = None,
    kv_events_config: Annotated[
        str | None, typer.Option(help="JSON object: publish KV events.", rich_help_panel=CACHE)
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Which workers and route: cost, least_loaded...", rich_help_panel=ORDER),
    ] = None,
    schedule_policy: Annotated[
        str | None,
        typer.Option(
            help="fcfs, lpm, dfs-weight, lof, random, priority, routing-key.", rich_help_panel=ORDER
        ),
    ] = None,
    schedule_conservativeness: Annotated[
        float | None,
        typer.Option(help="Times the growth that admission counts.", rich_help_panel=ORDER),
    ] = None,
    enable_priority_scheduling: Annotated[
        bool,
        typer.Option(
            "--enable-priority-scheduling",
            help="Higher priorities take the place of lower ones.",
            rich_help_panel=ORDER,
        ),
    ] = False,
    retraction_policy: Annotated[
        str | None,
        typer.Option(help="Who gives up pages first: length, priority.", rich_help_panel=ORDER),
    ] = None,
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Tokens of a prompt in a step.", rich_help_panel=LIMITS)
    ] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Of all prompts in a step.", rich_help_panel=LIMITS)
    ] = None,
    max_queued_per_tenant: Annotated[
        int | None, typer.Option(help="Of one API key; above, 429.", rich_help_panel=LIMITS)
    ] = None,
    max_running_per_tenant: Annotated[
        int | None, typer.Option(help="Of one API key; others wait.", rich_help_panel=LIMITS)
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="On one decode worker.", rich_help_panel=LIMITS)
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Waiting; above, 429.", rich_help_panel=LIMITS)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="That requests must bring; again for several.",
            envvar="PD_API_KEYS",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="For /admin and /flush_cache; else only from this machine.",
            envvar="PD_ADMIN_KEY",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Put prompts into the log.", rich_help_panel=ACCESS),
    ] = False,
    enable_cache_report: Annotated[
        bool,
        typer.Option(
            "--enable-cache-report",
            help="Usage tells cached tokens: it always does.",
            rich_help_panel=ACCESS,
        ),
    ] = False,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers.", rich_help_panel=CLUSTER)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers.", rich_help_panel=CLUSTER)
    ] = None,
    cluster_name: Annotated[
        str | None, typer.Option(help="Tells clusters on one Ray apart.", rich_help_panel=CLUSTER)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="An existing Ray cluster; else one is started.", rich_help_panel=CLUSTER),
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(help="HTTP servers, on successive ports.", rich_help_panel=CLUSTER)
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Serve in the background.", rich_help_panel=CLUSTER)
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C, which stops all that was started."""
    overrides: dict[str, Any] = {
        "host": host,
        "port": port,
        "model": model,
        "served_model_name": served_model_name[0] if served_model_name else None,
        "model_aliases": served_model_name[1:] if served_model_name else None,
        "chat_template": chat_template,
        "sampling_defaults": sampling_defaults,
        "api_keys": api_key or None,
        "admin_key": admin_key,
        "log_prompts": log_prompts or None,
        "dtype": dtype,
        "context_length": context_length,
        "page_size": page_size,
        "max_total_tokens": max_total_tokens,
        "radix_eviction_policy": radix_eviction_policy,
        "radix_eviction_policy_config": _json(
            "--radix-eviction-policy-config", radix_eviction_policy_config
        ),
        "disable_radix_cache": disable_radix_cache or None,
        "radix_cache_backend": radix_cache_backend,
        "strip_thinking_cache": strip_thinking_cache or None,
        "enable_hierarchical_cache": enable_hierarchical_cache or None,
        "hicache_ratio": hicache_ratio,
        "hicache_size": hicache_size,
        "hicache_write_policy": hicache_write_policy,
        "hicache_storage_backend": hicache_storage_backend,
        "hicache_storage_backend_extra_config": _json(
            "--hicache-storage-backend-extra-config", hicache_storage_backend_extra_config
        ),
        "hicache_storage_size": hicache_storage_size,
        "hicache_storage_prefetch_policy": hicache_storage_prefetch_policy,
        "kv_events_config": _json("--kv-events-config", kv_events_config),
        "placement": placement,
        "schedule_policy": schedule_policy,
        "schedule_conservativeness": schedule_conservativeness,
        "enable_priority_scheduling": enable_priority_scheduling or None,
        "retraction_policy": retraction_policy,
        "chunked_prefill_size": chunked_prefill_size,
        "max_prefill_tokens": max_prefill_tokens,
        "max_queued_per_tenant": max_queued_per_tenant,
        "max_running_per_tenant": max_running_per_tenant,
        "max_running_requests": max_running_requests,
        "max_queued_requests": max_queued_requests,
        "prefill": prefill,
        "decode": decode,
        "cluster_name": cluster_name,
        "gateways": gateways,
    }
    settings = load_config(config, set_, overrides)
    known = registry.find(settings.cluster_name)
    if known is not None and known.is_served:
        raise StartError(
            f"cluster {known.cluster_name!r} is served already at {known.url} (process"
            f" {known.server.pid}); choose another --cluster-name and --port"
        )
    if known is not None and known.leftovers():
        operations.take_down(settings.cluster_name, timeout_s=10)
    if not detach:
        _serve(settings, address)
        return
    # The command line as it was given, for a process of its own.
    arguments = [each for each in sys.argv[2:] if each != "--detach"]
    with console.status("starting"):
        started = operations.start_detached(
            arguments, settings.cluster_name, settings.timeouts.start_s + 300
        )
    console.print(
        f"pd-cluster serves at {started.url} in the background; its log is"
        f" {registry.log_path(settings.cluster_name)}; `pd-cluster down --cluster-name"
        f" {settings.cluster_name}` ends it",
        soft_wrap=True,
    )


def _serve(config: Config, address: str | None) -> None:
    from pd_cluster.serve import Server

    stop = threading.Event()

    def on_signal(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with console.status("starting") as status:
        server = Server.start(config, address, progress=status.update)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        registry.announce(config.cluster_name, server.cluster.urls, address)
        for line in server.describe():
            console.print(line)
        # The last line says that it is ready: scripts wait for it.
        urls = ", ".join(server.cluster.urls)
        console.print(f"pd-cluster is ready at {urls}; try:", soft_wrap=True)
        print(server.example(), flush=True)
        changes = server.cluster.changes
        while not stop.wait(2.0):
            server.check()
            if server.cluster.changes != changes:
                changes = server.cluster.changes
                registry.announce(config.cluster_name, server.cluster.urls, address)
    finally:
        registry.withdraw(config.cluster_name)
        with console.status("stopping"):
            server.stop()


@app.command()
def status(
    cluster_name: ClusterName = "pd",
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server says.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second.")] = False,
) -> None:
    """Show the workers of a running cluster, their pages and hit rates."""
    known = operations.served(cluster_name)
    info = operations.server_info(known)
    if as_json:
        print(json.dumps(info, indent=2))
        return
    if not watch:
        Console().print(operations.status_table(cluster_name, info))
        return
    with Live(operations.status_table(cluster_name, info), console=Console()) as live:
        while True:
            time.sleep(1)
            info = operations.server_info(known)
            live.update(operations.status_table(cluster_name, info))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    gateways: Annotated[int | None, typer.Option(help="HTTP servers.")] = None,
    cluster_name: ClusterName = "pd",
    admin_key: AdminKey = None,
    wait: Annotated[bool, typer.Option(help="Until all is as wanted.")] = True,
) -> None:
    """Change how many workers and gateways a running cluster has; streams go on."""
    counts = {"prefill": prefill, "decode": decode, "gateways": gateways}
    _scale("/admin/scale", counts, cluster_name, admin_key, wait)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as `status` shows it: decode-1.")],
    cluster_name: ClusterName = "pd",
    admin_key: AdminKey = None,
    wait: Annotated[bool, typer.Option(help="Until it is gone.")] = True,
) -> None:
    """Remove one worker: it gets no new work, finishes what it has, and goes."""
    name = worker.partition("@")[0]
    if not name:
        raise ConfigError("drain: no worker is named; `status` shows their names")
    _scale(f"/admin/workers/{quote(name, safe='')}/drain", None, cluster_name, admin_key, wait)


def _scale(
    path: str, body: dict[str, int | None] | None, name: str, key: str | None, wait: bool
) -> None:
    operator = scale_client.Operator(operations.served(name).url, key)
    taken = operator.ask(path, body or {})
    if not wait:
        console.print(scale_client.describe(taken), soft_wrap=True)
        return
    with console.status(scale_client.describe(taken)) as shown:
        reached = operator.wait(taken, lambda each: shown.update(scale_client.describe(each)))
    console.print(scale_client.describe(reached), soft_wrap=True)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="An answer's id, or its X-Request-Id.")],
    cluster_name: ClusterName = "pd",
    url: Annotated[str | None, typer.Option(help="A gateway's address, instead.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="If there is one.", envvar="PD_ADMIN_KEY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server says.")] = False,
) -> None:
    """Show what became of a request, and why it was placed where it was."""
    addresses = [url] if url is not None else operations.served(cluster_name).urls
    found = operations.explanation(addresses, request_id, admin_key)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for part in operations.explanation_tables(found):
        Console(highlight=False).print(part, soft_wrap=isinstance(part, str))


@app.command()
def down(
    cluster_name: ClusterName = "pd",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """Stop a running cluster, as Ctrl-C in its terminal; or remove what a killed one left."""
    console.print(operations.take_down(cluster_name, timeout), soft_wrap=True)


@app.command()
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


@app.command()
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


@app.command()
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


@model_app.command("pull")
def model_pull(name: Annotated[str, typer.Argument(help="A known name, e.g. smollm2.")]) -> None:
    """Fetch a model into the user's cache, once, and print its folder."""
    from pd_cluster.model.store import resolve_model

    print(resolve_model(name))


@model_app.command("list")
def model_list() -> None:
    """The known models, and the folders in the cache."""
    from pd_cluster.model.store import known_models, models_dir

    for name in known_models():
        print(name)
    folder = models_dir()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir():
            print(path)


def _json(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: expected a JSON object")
    return value


def main() -> None:
    """Errors that a user can mend are one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ConfigError, ModelError, StartError) as error:
        # Other libraries' messages, which ours may quote, can have several lines.
        line = " ".join(str(error).split())
        console.print(f"error: {line}", markup=False, soft_wrap=True)
        sys.exit(2)
    except PdClusterError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
