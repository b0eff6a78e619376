"""Starting, finding and stopping the actors of a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from pd_cluster.config import Config
from pd_cluster.coordinator.actor import COORDINATOR_GROUPS, CoordinatorActor
from pd_cluster.errors import StartError
from pd_cluster.gateway.actor import GatewayActor
from pd_cluster.nodes import actor_options, beside_the_server
from pd_cluster.peers import COORDINATOR, NAMESPACE, ClusterSpec, actor_name
from pd_cluster.worker.actor import WORKER_GROUPS, WorkerActor

logger = logging.getLogger(__name__)

# A gateway answers within this time (seconds), or is asked again later.
QUESTION_S = 10.0
# Ray's store holds none of our pages: only its own small things.
OBJECT_STORE_BYTES = 100 * 1024 * 1024
REACHABLE_S = 5.0


def init_ray(address: str | None = None, temp_dir: str | None = None) -> None:
    """Connects to a Ray cluster, or starts one on this machine that ends with this process.

    Raises StartError where Ray cannot be reached or started.
    """
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    # Ray warns, on every import, of a default that is to change for GPU counts; we set none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would run our actors at the lowest priority but four: any other program starves them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options |= {
            "address": "local",
            "include_dashboard": False,
            # Our actors ask for no CPU, and Ray keeps an idle worker ready for each that it has.
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": temp_dir,
        }
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:
        where = f"at {address}" if address else "on this machine"
        raise StartError(f"no Ray {where}: {error}") from error


def _check_reachable(address: str) -> None:
    """Where nothing listens Ray would try for minutes, and print a line every few seconds."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.hostname and parts.port:  # else a word that Ray knows, such as "auto"
            socket.create_connection((parts.hostname, parts.port), REACHABLE_S).close()
    except (OSError, ValueError) as error:
        raise StartError(f"no Ray at {address}: {error}") from error


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to an existing Ray cluster. Raises StartError where there is none."""
    init_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def kill_actors(cluster_name: str) -> int:
    """Ends all actors of that cluster, whoever started them; how many there were."""
    named = ray.util.list_named_actors(all_namespaces=True)
    prefix = actor_name(cluster_name, "")
    names = [
        each["name"]
        for each in named
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    ]
    for name in names:
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        except (ValueError, RayError) as error:
            logger.warning("%s: %s", name, error)
    return len(names)


class Cluster:
    """The actors that one `serve` started."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.urls: list[str] = []
        self.actors: dict[str, Any] = {}

    @classmethod
    def start(
        cls,
        config: Config,
        model_folder: Path,
        model_id: str,
        *,
        local: bool,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Cluster:
        """Starts all actors and waits until requests can be served.

        Ray must have been initialised; `local` where that started one. Raises StartError, with whatever was started stopped again.
        """
        cluster = cls(config)
        spec = ClusterSpec(
            config=config.model_dump_json(),
            model_folder=str(model_folder.resolve()),
            model_id=model_id,
            secret=secrets.token_bytes(32),
            local=local,
        )
        try:
            cluster._start(spec, progress)
        except BaseException:
            cluster.stop(grace=False)
            raise
        return cluster

    def _start(self, spec: ClusterSpec, progress: Callable[[str], None]) -> None:
        config = self.config
        deadline = time.monotonic() + config.timeouts.start_s
        here = beside_the_server()
        self._launch(COORDINATOR, CoordinatorActor, COORDINATOR_GROUPS, here, spec)
        names = []
        for role, count in (("prefill", config.prefill), ("decode", config.decode)):
            node = actor_options(getattr(config.resources, role))
            for index in range(count):
                name = f"{role}-{index}"
                self._launch(name, WorkerActor, WORKER_GROUPS, node, spec, name, role)
                names.append(name)
        gateways = [f"gateway-{index}" for index in range(config.gateways)]
        for name in gateways:
            self._launch(name, GatewayActor, {}, here, spec, name)
        progress(f"loading the model in {len(names)} workers")
        for name in names:
            self._get(name, self.actors[name].ready.remote(), deadline)
        for index, name in enumerate(gateways):
            # Each has a port of its own: the first one's, the next, and so on.
            port = config.port + index if config.port else 0
            self.urls.append(self._get(name, self.actors[name].start.remote(port), deadline))
        progress("waiting for the workers to register")
        coordinator = self.actors[COORDINATOR]
        while True:
            snapshot = self._get(COORDINATOR, coordinator.snapshot.remote(), deadline)
            if len(snapshot.workers) == len(names):
                return
            if time.monotonic() > deadline:
                ready = ", ".join(str(each.worker) for each in snapshot.workers) or "none"
                raise StartError(f"not all workers registered in time; ready: {ready}")
            time.sleep(0.05)

    def keep_serving(self) -> None:
        """Has a gateway that Ray has restarted bind its port again; to be called now and then."""
        for index, url in enumerate(self.urls):
            name = f"gateway-{index}"
            try:
                ray.get(self.actors[name].start.remote(urlsplit(url).port), timeout=QUESTION_S)
            except (RayError, GetTimeoutError) as error:
                logger.warning("%s does not answer: %s", name, str(error).splitlines()[0])

    def stop(self, *, grace: bool = True) -> None:
        """Lets running streams finish for a while, then ends every actor. Never raises."""
        gateways = [actor for name, actor in self.actors.items() if name.startswith("gateway-")]
        if grace and gateways:
            wait_s = self.config.timeouts.shutdown_s + 10
            try:
                ray.get([actor.stop.remote() for actor in gateways], timeout=wait_s)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the gateways did not stop by themselves: %s", error)
        for name, actor in self.actors.items():
            try:
                ray.kill(actor)
            except (RayError, ValueError) as error:
                logger.warning("%s: %s", name, error)
        self.actors.clear()

    def _launch(
        self, name: str, actor: type, groups: dict[str, int], node: dict[str, Any], *args: Any
    ) -> None:
        threads = str(self.config.threads or os.cpu_count() or 1)
        options: dict[str, Any] = {
            "name": actor_name(self.config.cluster_name, name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 100_000,
            **node,
            "runtime_env": {
                "env_vars": {
                    # Ray would set one thread; waiting threads must leave the cores to others.
                    "OMP_NUM_THREADS": threads,
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "UCX_LOG_LEVEL": os.environ.get("UCX_LOG_LEVEL", "error"),
                    "TOKENIZERS_PARALLELISM": "false",
                }
            },
        }
        try:
            remote: Any = ray.remote  # its stubs do not know concurrency groups
            decorated = remote(concurrency_groups=groups)(actor)
            self.actors[name] = decorated.options(**options).remote(*args)
        except ValueError as error:
            raise StartError(
                f"a cluster named {self.config.cluster_name!r} is running already: {error}"
            ) from error

    def _get(self, name: str, ref: Any, deadline: float) -> Any:
        try:
            return ray.get(ref, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise StartError(f"{name} was not ready in time") from error
        except RayTaskError as error:
            raise StartError(f"{name}: {error.cause or error}") from error
        except RayActorError as error:
            raise StartError(f"{name} could not start: {error}") from error
