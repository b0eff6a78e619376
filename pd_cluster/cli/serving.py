"""`pd-cluster serve`."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated, Any

import typer

from pd_cluster import operations, registry
from pd_cluster.cli.common import console
from pd_cluster.cli.options import ConfigFile, Settings, command
from pd_cluster.config import Config, load_config
from pd_cluster.errors import StartError


@command
def serve(
    *,
    config: ConfigFile = None,
    set_: Settings = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="An existing Ray cluster; else one is started", rich_help_panel="Cluster"
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Serve in the background", rich_help_panel="Cluster")
    ] = False,
    enable_cache_report: Annotated[
        bool,
        typer.Option(
            "--enable-cache-report",
            help="Usage tells cached tokens: it always does",
            rich_help_panel="Access and logs",
        ),
    ] = False,
    overrides: dict[str, Any],
) -> None:
    """Start a cluster and serve until Ctrl-C, which stops all that was started."""
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
        run_server(settings, address)
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


def run_server(config: Config, address: str | None) -> None:
    """Serves until a signal says to end; then streams may finish within their grace time."""
    from pd_cluster.serve import Server

    stop = threading.Event()

    def on_signal(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.status("starting") as status:
        server = Server.start(config, address, progress=status.update)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        registry.announce(config.cluster_name, server.cluster.urls, address)
        for line in server.describe():
            console.print(line, soft_wrap=True)
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
        with console.status("stopping") as status:
            said: list[str] = []

            def tell(what: str) -> None:
                status.update(what)
                if said[-1:] != [what]:
                    console.print(what, soft_wrap=True)
                    said.append(what)

            server.stop(progress=tell)
        console.print("pd-cluster has ended")
