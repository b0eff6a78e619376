"""Starting, finding and stopping the actors of a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from pd_cluster.config import Config
from pd_cluster.coordinator.actor import COORDINATOR_GROUPS, CoordinatorActor
from pd_cluster.errors import RequestError, StartError
from pd_cluster.gateway.actor import GatewayActor
from pd_cluster.nodes import actor_options, beside_the_server, capacity
from pd_cluster.peers import COORDINATOR, NAMESPACE, ClusterSpec, actor_name
from pd_cluster.pools import KvPool
from pd_cluster.scaling import (
    Counts,
    End,
    GiveUp,
    Kind,
    Launch,
    News,
    Order,
    Refusal,
    Scaler,
    StopServing,
)
from pd_cluster.worker.actor import WORKER_GROUPS, WorkerActor

logger = logging.getLogger(__name__)

# A gateway answers within this time (seconds), or is asked again later.
QUESTION_S = 10.0
# Between two looks at whether anybody wishes other numbers, and at what is under way (seconds).
WISHES_S = 1.0
# Between two looks at how many requests still run when all is to end.
DRAIN_LOOK_S = 0.5
SCALING_S = 0.2
# Ray's store holds none of our pages: only its own small things.
OBJECT_STORE_BYTES = 100 * 1024 * 1024
REACHABLE_S = 5.0
# Settings of a Ray of our own, in its processes' environment.
LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would run our actors at the lowest priority but four: any other program starves them.
    "RAY_worker_niceness": "0",
    # Nobody reads its statistics, and on one node no scheduler waits for news of resources: an idle
    # cluster takes a quarter less processor time without.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
}


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
        for name, value in LOCAL_RAY.items():
            os.environ.setdefault(name, value)
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
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except Exception as error:
        where = f"at {address}" if address else "on this machine"
        raise StartError(f"no Ray {where}: {error}") from error
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler would abort the process.
        signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)


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
    """The actors that one `serve` started, and what changes their numbers while it runs."""

    def __init__(
        self, config: Config, spec: ClusterSpec, objection: Callable[[Counts], str | None]
    ) -> None:
        self.config = config
        self.spec = spec
        self.urls: list[str] = []
        self.actors: dict[str, Any] = {}
        counts = Counts(prefill=config.prefill, decode=config.decode, gateway=config.gateways)
        self.scaler = Scaler(counts, grace_s=config.timeouts.scale_in_s, objection=objection)
        # Increases whenever there are other actors or URLs than before.
        self.changes = 0
        self._ports: dict[str, int] = {}  # of gateways
        self._pending: dict[str, _Pending] = {}  # those that start, or stop serving
        self._answers: dict[int, Refusal | None] = {}
        self._stopping = threading.Event()
        self._scaling: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        config: Config,
        model_folder: Path,
        model_id: str,
        kv_pool: KvPool,
        *,
        local: bool,
        objection: Callable[[Counts], str | None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Cluster:
        """Starts all actors and waits until requests can be served.

        Ray must have been initialised; `local` where that started one of its own. `objection`
        says why other counts cannot be had, or None. Raises StartError, with whatever was started
        stopped again.
        """
        spec = ClusterSpec(
            config=config.model_dump_json(),
            model_folder=str(model_folder.resolve()),
            model_id=model_id,
            secret=secrets.token_bytes(32),
            local=local,
            kv_pool=kv_pool,
        )
        cluster = cls(config, spec, objection)
        try:
            cluster._start(progress)
        except BaseException:
            cluster.stop(grace=False)
            raise
        return cluster

    def _start(self, progress: Callable[[str], None]) -> None:
        config = self.config
        deadline = time.monotonic() + config.timeouts.start_s
        self._launch(COORDINATOR, "coordinator")
        for name, member in self.scaler.members.items():
            self._launch(name, member.kind)
        workers = [name for name in self.actors if _is_worker(name)]
        progress(f"loading the model in {len(workers)} workers")
        for name in workers:
            self._get(name, self.actors[name].ready.remote(), deadline)
        for index in range(config.gateways):
            name = f"gateway-{index}"
            self.urls.append(self._get(name, self._serve(name), deadline))
        progress("waiting for the workers to register")
        coordinator = self.actors[COORDINATOR]
        while True:
            snapshot = self._get(COORDINATOR, coordinator.snapshot.remote(), deadline)
            ready = [each for each in snapshot.workers if each.state == "ready"]
            if len(ready) == len(workers):
                break
            if time.monotonic() > deadline:
                names = ", ".join(str(each.worker) for each in ready) or "none"
                raise StartError(f"not all workers registered in time; ready: {names}")
            time.sleep(0.05)
        self._scaling = threading.Thread(target=self._scale_forever, name="scaling", daemon=True)
        self._scaling.start()

    def _serve(self, name: str) -> Any:
        """Has a gateway bind its port: the first one's, the next, and so on. Its URL."""
        index = int(name.rpartition("-")[2])
        port = self.config.port + index if self.config.port else 0
        return self.actors[name].start.remote(self._ports.get(name, port))

    def keep_serving(self) -> None:
        """Has a gateway that Ray has restarted bind its port again; to be called now and then."""
        for index, url in enumerate(list(self.urls)):
            name = f"gateway-{index}"
            self._ports[name] = urlsplit(url).port or 0
            try:
                ray.get(self._serve(name), timeout=QUESTION_S)
            except (RayError, GetTimeoutError, KeyError) as error:
                logger.warning("%s does not answer: %s", name, str(error).splitlines()[0])

    # --- other numbers while it runs: a thread of its own ---

    def _scale_forever(self) -> None:
        while True:
            busy = not self.scaler.status.steady or self._answers
            if self._stopping.wait(SCALING_S if busy else WISHES_S):
                return
            try:
                self._scale()
            except (RayError, GetTimeoutError) as error:
                logger.warning("scaling: %s", str(error).splitlines()[0])
            except Exception:
                logger.exception("scaling")

    def _scale(self) -> None:
        """One round: tells the coordinator what there is, takes wishes, and does what is due."""
        scaler, now = self.scaler, time.monotonic()
        order = Order(status=scaler.status, draining=scaler.draining, answers=self._answers)
        reply = self.actors[COORDINATOR].order.remote(msgspec.msgpack.encode(order))
        news = msgspec.msgpack.decode(ray.get(reply, timeout=QUESTION_S), type=News)
        self._answers = {}
        for number, wish in news.wishes.items():
            try:
                scaler.wish(wish)
                self._answers[number] = None
            except RequestError as error:
                self._answers[number] = Refusal(status=error.status, message=error.message)
        self._look_at_pending(news, now)
        idle = {name: self._is_idle(name, news) for name in order.draining}
        idle |= {name: each.done() for name, each in self._pending.items() if each.stops}
        for instruction in scaler.plan(idle, now):
            match instruction:
                case Launch(name, kind):
                    self._add(name, kind)
                case StopServing(name):
                    self.urls.pop()
                    stopped = self.actors[name].stop.remote(scaler.grace_s)
                    self._pending[name] = _Pending(stopped, now, stops=True)
                case GiveUp(name):
                    self.actors[name].give_up.remote()
                case End(name):
                    self._end(name)

    def _add(self, name: str, kind: Kind) -> None:
        try:
            self._launch(name, kind)
        except StartError as error:
            self.scaler.failed(name, str(error))
            return
        warm = self._serve(name) if kind == "gateway" else self.actors[name].ready.remote()
        self._pending[name] = _Pending(warm, time.monotonic())

    def _look_at_pending(self, news: News, now: float) -> None:
        """Which of those that start are warm, and known to the coordinator."""
        for name, pending in list(self._pending.items()):
            late = now - pending.since > self.config.timeouts.start_s
            if pending.stops or not (late or pending.done()):
                continue
            try:
                answer = self._get(name, pending.ref, now)
            except StartError as error:
                self._end(name, why=str(error))
                continue
            if _is_worker(name) and name not in news.placed:
                if late:
                    self._end(name, why="it did not register in time")
                continue
            del self._pending[name]
            if not _is_worker(name):
                self.urls.append(answer)
            self.changes += 1
            self.scaler.started(name, now)

    def _is_idle(self, name: str, news: News) -> bool:
        """Whether nothing of a worker that gets no new work is used any more."""
        if news.placed.get(name):
            return False
        if name in self._pending:
            return True  # it would answer when it has loaded the model
        try:
            return bool(ray.get(self.actors[name].idle.remote(), timeout=QUESTION_S))
        except (RayError, GetTimeoutError):
            return False  # it is busy, or Ray restarts it

    def _end(self, name: str, why: str | None = None) -> None:
        """Ends an actor that is to leave, or that could not start for a reason."""
        self._pending.pop(name, None)
        self._ports.pop(name, None)
        ray.kill(self.actors.pop(name))
        self._await_end(name)
        self.changes += 1
        if why is None or self.scaler.members[name].state == "draining":
            self.scaler.gone(name)
        else:
            self.scaler.failed(name, why)

    def _await_end(self, name: str) -> None:
        """Until its name is free for another."""
        end = time.monotonic() + QUESTION_S
        while time.monotonic() < end:
            try:
                ray.get_actor(actor_name(self.config.cluster_name, name), namespace=NAMESPACE)
            except ValueError:
                return
            time.sleep(0.02)

    def stop(self, *, grace: bool = True, progress: Callable[[str], None] = lambda _: None) -> None:
        """Lets running streams finish for a while, then ends every actor. Never raises."""
        self._stopping.set()
        if self._scaling is not None:
            self._scaling.join(QUESTION_S)
        gateways = [actor for name, actor in self.actors.items() if name.startswith("gateway-")]
        if grace and gateways:
            try:
                self._drain(gateways, progress)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the gateways did not stop by themselves: %s", error)
        progress(f"stopping {', '.join(self.actors)}")
        for name, actor in self.actors.items():
            try:
                ray.kill(actor)
            except (RayError, ValueError) as error:
                logger.warning("%s: %s", name, error)
        self.actors.clear()

    def _drain(self, gateways: list[Any], progress: Callable[[str], None]) -> None:
        """Has the gateways refuse new requests, and waits for those that run."""
        grace_s = self.config.timeouts.shutdown_s
        stopping = [actor.stop.remote(grace_s) for actor in gateways]
        end = time.monotonic() + grace_s + QUESTION_S
        left = stopping
        while left and time.monotonic() < end:
            running = sum(
                ray.get([actor.inside.remote() for actor in gateways], timeout=QUESTION_S)
            )
            if running:
                progress(
                    f"draining {running} request{'s' if running > 1 else ''}, for {grace_s:g} s at"
                    " most (timeouts.shutdown_s); new ones are refused"
                )
            _, left = ray.wait(stopping, num_returns=len(stopping), timeout=DRAIN_LOOK_S)
        ray.get(stopping, timeout=0)

    def _launch(self, name: str, kind: Kind | Literal["coordinator"]) -> None:
        actor: type
        groups: dict[str, int]
        match kind:
            case "coordinator":
                actor, groups, node = CoordinatorActor, COORDINATOR_GROUPS, beside_the_server()
                args: tuple[Any, ...] = (self.spec,)
            case "gateway":
                actor, groups, node = GatewayActor, {}, beside_the_server()
                args = (self.spec, name)
            case _:
                actor, groups = WorkerActor, WORKER_GROUPS
                node = actor_options(self.config.needs(kind))
                args = (self.spec, name, kind)
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
            raise StartError(f"{name} was not ready in time{self._hint(name)}") from error
        except RayTaskError as error:
            raise StartError(f"{name}: {error.cause or error}") from error
        except RayActorError as error:
            raise StartError(f"{name} could not start: {error}") from error

    def _hint(self, name: str) -> str:
        """That nodes lack what it needs, if that is why."""
        role = name.rpartition("-")[0]
        needs = self.config.needs(role) if _is_worker(name) else {}
        resources: Callable[[], dict[str, float]] = ray.available_resources
        free = capacity(needs, [resources()])
        return f"; no node has what it needs free: {needs}" if free == 0 else ""


@dataclass(frozen=True)
class _Pending:
    """What an actor was asked, and when: to be warm, or to stop serving."""

    ref: Any
    since: float
    stops: bool = False

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0)[0])


def _is_worker(name: str) -> bool:
    return name.startswith(("prefill-", "decode-"))
