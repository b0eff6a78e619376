"""Where actors run, and at which address and by which NICs workers exchange pages there.

Nothing of it needs to be configured: Ray knows its nodes' addresses, and a role's `resources` say
which nodes it may have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pd_cluster.config import Config
from pd_cluster.errors import StartError
from pd_cluster.model.store import resolve_model
from pd_cluster.pools import Host

LOOPBACK = "127.0.0.1"
# The kernel's list of InfiniBand and RoCE devices.
_FABRICS = Path("/sys/class/infiniband")
_CGROUP = Path("/sys/fs/cgroup")
# A node answers a question within this time (seconds), or is not well.
QUESTION_S = 60.0
# What Ray takes as an option of its own; every other name is a custom resource.
_RAY_OPTIONS = ("num_cpus", "num_gpus", "memory")


@dataclass(frozen=True)
class Attachment:
    """How a worker's transfers reach it: the address that it binds and tells, UCX's settings."""

    host: str
    ucx: Mapping[str, str]


def attach(config: Config, *, local: bool) -> Attachment:
    """For a worker on this node. `local`: the Ray under the cluster has this one node for good.

    Raises StartError where this node has no address that others can reach.
    """
    if local:
        return Attachment(LOOPBACK, dict(config.transfer.ucx))
    addresses = node_addresses()
    own = addresses.pop(ray.get_runtime_context().get_node_id())
    interfaces = {
        name: [each.address.partition("%")[0] for each in found]
        for name, found in psutil.net_if_addrs().items()
    }
    fabrics = sorted(path.name for path in _FABRICS.iterdir()) if _FABRICS.is_dir() else []
    chosen = dict(config.transfer.ucx)
    if (devices := os.environ.get("UCX_NET_DEVICES")) is not None:
        chosen.setdefault("NET_DEVICES", devices)
    host = reachable_address(own, list(addresses.values()))
    return Attachment(host, transport_settings(chosen, host, interfaces, fabrics))


def reachable_address(own: str, others: Sequence[str]) -> str:
    """The node's address as Ray knows it, which every other node of the cluster can dial.

    Raises StartError for a loopback address beside nodes that have others: started with it, the
    node could join them, but none of them could reach its workers.
    """
    if _is_loopback(own) and not all(_is_loopback(other) for other in others):
        raise StartError(
            f"Ray knows this node as {own}, which the others ({', '.join(sorted(others))}) cannot"
            " reach; start Ray here with --node-ip-address"
        )
    return own


def transport_settings(
    chosen: Mapping[str, str],
    host: str,
    interfaces: Mapping[str, Sequence[str]],
    fabrics: Sequence[str],
) -> dict[str, str]:
    """UCX's settings on a node: what was chosen, and the NIC where that was left open.

    Without a fabric UCX would use any interface that is up, those of containers' bridges too,
    over which no other host is reached: it is kept to the one that has the node's address.
    With a fabric it finds the best by itself.
    """
    settings = dict(chosen)
    if not fabrics and "NET_DEVICES" not in settings:
        devices = [name for name, addresses in interfaces.items() if host in addresses]
        if devices:
            settings["NET_DEVICES"] = devices[0]
    return settings


def advertised_host(bound: str, node_address: str) -> str:
    """The host of a URL that clients can use: a wildcard stands for the node's own address."""
    host = node_address if bound in ("", "0.0.0.0", "::") else bound
    return f"[{host}]" if ":" in host else host


def node_addresses() -> dict[str, str]:
    """The addresses of the nodes that live, as Ray knows them, by their ids."""
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    return {each["NodeID"]: each["NodeManagerAddress"] for each in list_nodes() if each["Alive"]}


def node_address() -> str:
    """This node's."""
    return node_addresses()[ray.get_runtime_context().get_node_id()]


def available_memory() -> int:
    """Bytes that this host, or the container that this process is in, has to give."""
    available: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return available  # no limit, or none that can be read
    return min(available, max(0, limit - used + cached))


def gpu_memory(device: str) -> list[tuple[str, int]]:
    """Name and bytes of each GPU that workers on this host would use."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(each.name, each.total_memory) for each in every]


def worker_memory(device: str) -> tuple[int, str]:
    """Bytes that workers on this host have for weights and pools, and of what: all GPUs of a host
    are alike."""
    for name, total in gpu_memory(device):
        return total, f"memory of {name}"
    return available_memory(), "available memory"


def _sharing(config: Config, workers: int, of: str) -> int:
    """How many of a host's workers share what `worker_memory` told."""
    shares = [config.needs(role).get("num_gpus", 0.0) for role in ("prefill", "decode")]
    if of == "available memory" or not all(shares):
        return workers  # whoever is given no GPU takes the first
    return min(workers, max(1, int(1 / min(shares))))


def hosts_for(config: Config, *, local: bool) -> list[Host]:
    """Where workers may run, and how many at most. Unless `local`, Ray must be connected."""
    counts = {"prefill": config.prefill, "decode": config.decode}
    if local:
        memory, of = worker_memory(config.device)
        workers = sum(counts.values())
        return [Host("this machine", memory, _sharing(config, workers, of), of)]
    remote: Any = ray.remote  # its stubs do not know options by name
    ask = remote(num_cpus=0)(worker_memory)
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    asked: list[tuple[str, int, Any]] = []
    for node in list_nodes():
        workers = 0
        for role, count in counts.items():
            most = capacity(config.needs(role), [node["Resources"]])
            workers += count if most is None else min(count, most)
        if node["Alive"] and workers:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = ask.options(scheduling_strategy=there).remote(config.device)
            asked.append((node["NodeManagerAddress"], workers, answer))
    try:
        answers: list[tuple[int, str]] = ray.get(
            [answer for _, _, answer in asked], timeout=QUESTION_S
        )
    except (RayError, GetTimeoutError) as error:
        raise StartError(f"a node did not say what memory it has: {error}") from error
    return [
        Host(name, memory, _sharing(config, workers, of), of)
        for (name, workers, _), (memory, of) in zip(asked, answers, strict=True)
    ]


def model_folder(folder: str, model: str) -> Path:
    """The model's folder on this node: where the server has it, else fetched or found here.

    Raises ModelError.
    """
    path = Path(folder)
    return path if path.is_dir() else resolve_model(model)


def actor_options(wanted: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for an actor that needs these resources, on whichever node has them free."""
    options: dict[str, Any] = {"num_cpus": 0.0, "scheduling_strategy": "SPREAD"}
    options |= {name: amount for name, amount in wanted.items() if name in _RAY_OPTIONS}
    custom = {name: amount for name, amount in wanted.items() if name not in _RAY_OPTIONS}
    return options | ({"resources": custom} if custom else {})


def beside_the_server() -> dict[str, Any]:
    """Ray's options for an actor on the node where `serve` runs; elsewhere if that node is lost."""
    here = ray.get_runtime_context().get_node_id()
    return {
        "num_cpus": 0.0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True),
    }


def capacity(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int | None:
    """How many actors that need these resources the nodes could hold; None: any number."""
    named = {"num_cpus": "CPU", "num_gpus": "GPU"}
    needs = {named.get(name, name): amount for name, amount in wanted.items() if amount > 0}
    if not needs:
        return None
    return sum(
        min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items())
        for node in nodes
    )


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
