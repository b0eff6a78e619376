"""What an operator does from a terminal with clusters that run: see them, start and end them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
from rich import box
from rich.table import Table

from pd_cluster import registry
from pd_cluster.errors import StartError
from pd_cluster.registry import KnownCluster

# A question to a server is answered within this time (seconds), or the server is not well.
QUESTION_S = 15.0


def served(cluster_name: str) -> KnownCluster:
    """The running cluster of that name. Raises StartError where there is none."""
    known = registry.find(cluster_name)
    if known is None:
        others = ", ".join(each.cluster_name for each in registry.find_all())
        known_here = f"; known here: {others}" if others else ""
        raise StartError(f"no cluster {cluster_name!r} is running{known_here}")
    if not known.is_served:
        raise StartError(
            f"the `serve` of cluster {cluster_name!r} (process {known.server.pid}) was killed;"
            f" {describe_leftovers(known)}; `pd-cluster down --cluster-name {cluster_name}`"
            " removes what is left"
        )
    return known


def describe_leftovers(known: KnownCluster) -> str:
    count = len(known.leftovers())
    if known.ray_address is not None:
        return f"its actors may still run in the Ray at {known.ray_address}"
    return f"{count} of its processes still run" if count else "none of its processes runs any more"


def server_info(known: KnownCluster) -> dict[str, Any]:
    """What the first gateway says. Raises StartError where it does not answer."""
    try:
        with urllib.request.urlopen(f"{known.url}/server_info", timeout=QUESTION_S) as response:
            info: dict[str, Any] = json.load(response)
    except OSError as error:
        raise StartError(f"{known.url} does not answer: {error}") from error
    except ValueError as error:
        raise StartError(f"{known.url} does not answer as pd-cluster does: {error}") from error
    return {"url": known.url, "urls": known.urls, "pid": known.server.pid, **info}


def status_table(cluster_name: str, info: dict[str, Any]) -> Table:
    """The workers, their requests, their pages by state (in tokens) and their hit rates."""
    title = f"{cluster_name}: {info['model']} at {', '.join(info['urls'])}"
    table = Table(title=title, box=box.SIMPLE, padding=0)
    columns = {
        "run": "running",
        "wait": "waiting",
        "free": "free",
        "evict.": "evictable",
        "locked": "protected",
        "priv.": "private",
        "flight": "in_flight",
    }
    # Nothing is cut short in 80 columns.
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for column in (*columns, "hits"):
        table.add_column(column, justify="right", no_wrap=True)
    states = {
        each["worker"]["name"]: each["state"]
        for each in (info.get("coordinator") or {}).get("workers", [])
    }
    for worker in info["workers"]:
        queries, hits = worker["cache_queries"], worker["cache_hits"]
        table.add_row(
            f"{worker['worker']['name']}@{worker['worker']['incarnation']}",
            states.get(worker["worker"]["name"], "-"),
            *(short(worker[field]) for field in columns.values()),
            f"{hits / queries:.0%}" if queries else "-",
        )
    coordinator = info.get("coordinator")
    if coordinator:
        table.caption = f"{coordinator['running']} placed, {coordinator['waiting']} waiting"
        if url := coordinator.get("metrics_url"):
            table.caption += f"; metrics at {url}"
    return table


def short(count: int) -> str:
    """At most five characters, so that no column is ever cut."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 1000)):
        if count >= 10 * size:
            return f"{count // size}{unit}"
    return str(count)


def explanation(urls: list[str], request_id: str, admin_key: str | None) -> dict[str, Any]:
    """What became of a request and why it was placed where it was: each gateway knows its own.

    Raises StartError where none of them does.
    """
    complaint = ""
    for url in urls:
        address = f"{url}/admin/requests/{urllib.parse.quote(request_id)}"
        headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        request = urllib.request.Request(address, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=QUESTION_S) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            with error:
                try:
                    complaint = json.load(error)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    complaint = f"{url} does not answer as pd-cluster does: {error}"
        except OSError as error:
            complaint = f"{url} does not answer: {error}"
    raise StartError(complaint)


def explanation_tables(found: dict[str, Any]) -> Iterator[Table | str]:
    """For each sequence its story, and for each attempt the candidates and what they would cost."""
    for sequence in found["sequences"]:
        table = Table(title=f"{sequence['id']}: {sequence['state']}", box=box.SIMPLE)
        table.add_column("seconds ago", justify="right")
        table.add_column("state")
        table.add_column("why")
        for move in sequence["story"]:
            table.add_row(f"{move['ago_s']:.3f}", move["state"], move["why"])
        yield table
        for placed in sequence["placements"]:
            sides = (
                f"{side} {placed[side]} (holds {_tokens(placed, f'{side}_')} tokens)"
                for side in ("prefill", "decode")
            )
            waited = f"after {placed['queue_s']:.3f} s in the queue"
            yield f"attempt {placed['attempt']}: {', '.join((placed['route'], *sides, waited))}"
            for group, candidates in placed["candidates"].items():
                yield _candidates_table(group, candidates)


def _candidates_table(group: str, candidates: list[dict[str, Any]]) -> Table:
    """The cheapest first; terms in milliseconds; "64+128" tokens are 128 on lower tiers."""
    names = list(dict.fromkeys(name for each in candidates for name in each))
    terms = [name for name in names if name not in ("worker", "cost", "held", "below")]
    table = Table(title=f"{group} (costs in ms)", box=box.SIMPLE)
    table.add_column("worker", no_wrap=True)
    for name in ("held", "cost", *terms):
        table.add_column(name, justify="right")
    for each in sorted(candidates, key=lambda each: float(each["cost"])):
        costs = (each.get(name) for name in ("cost", *terms))
        shown = ("-" if cost is None else f"{1000 * cost:.2f}" for cost in costs)
        table.add_row(each["worker"], _tokens(each), *shown)
    return table


def _tokens(found: dict[str, Any], prefix: str = "") -> str:
    below = found.get(f"{prefix}below")
    return f"{found[f'{prefix}held']}" + (f"+{below}" if below else "")


def start_detached(arguments: list[str], cluster_name: str, timeout_s: float) -> KnownCluster:
    """Runs `pd-cluster serve` with these arguments in the background, and waits until it is ready.

    Raises StartError, with the end of its log, where it does not come up.
    """
    log = registry.log_path(cluster_name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pd_cluster", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        known = registry.find(cluster_name)
        if known is not None and known.server.pid == process.pid:
            return known
        if process.poll() is not None:
            tail = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise StartError(f"it ended with code {process.returncode}: {' '.join(tail)}")
        time.sleep(0.1)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(QUESTION_S)
    raise StartError(f"not ready within {timeout_s:g} s; its log is {log}")


def take_down(cluster_name: str, timeout_s: float) -> str:
    """Ends a cluster, or what a killed `serve` left of it; a sentence that says what was done.

    Raises StartError where there is nothing to end, or it does not end in time.
    """
    known = registry.find(cluster_name)
    if known is None:
        served(cluster_name)  # says what there is
        raise AssertionError
    process = known.server.find()
    if process is not None:
        process.terminate()
        end = time.monotonic() + timeout_s
        # Not psutil's wait: a parent that has yet to collect its child would keep it waiting.
        while known.server.find() is not None:
            if time.monotonic() > end:
                raise StartError(
                    f"process {process.pid} still runs after {timeout_s:g} s; its streams may need"
                    " longer"
                )
            time.sleep(0.1)
        return f"cluster {cluster_name!r} is down"
    removed = len(_end(known.leftovers(), timeout_s))
    actors = 0
    if known.ray_address is not None:
        from pd_cluster.cluster import connected, kill_actors

        with connected(known.ray_address):
            actors = kill_actors(cluster_name)
    registry.withdraw(cluster_name)
    return (
        f"removed what was left of cluster {cluster_name!r}: {removed} processes, {actors} actors"
    )


def _end(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Terminates processes, and kills those that do not go."""
    for signal in ("terminate", "kill"):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, signal)()
        _, alive = psutil.wait_procs(processes, timeout=timeout_s)
        if not alive:
            break
    return processes
