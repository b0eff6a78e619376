"""Commands for clusters that run: status, scale, drain, explain, down."""

from __future__ import annotations

import json
import time
from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live

from pd_cluster import operations, scale_client
from pd_cluster.cli.common import AdminKey, AsJson, ClusterName, console
from pd_cluster.errors import ConfigError


def status(
    cluster_name: ClusterName = "pd",
    as_json: AsJson = False,
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


def explain(
    request_id: Annotated[str, typer.Argument(help="An answer's id, or its X-Request-Id.")],
    cluster_name: ClusterName = "pd",
    url: Annotated[str | None, typer.Option(help="A gateway's address, instead.")] = None,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what became of a request, and why it was placed where it was."""
    addresses = [url] if url is not None else operations.served(cluster_name).urls
    found = operations.explanation(addresses, request_id, admin_key)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for part in operations.explanation_tables(found):
        Console(highlight=False).print(part, soft_wrap=isinstance(part, str))


def down(
    cluster_name: ClusterName = "pd",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """Stop a running cluster, as Ctrl-C in its terminal; or remove what a killed one left."""
    console.print(operations.take_down(cluster_name, timeout), soft_wrap=True)
