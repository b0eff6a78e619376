"""How the actors of a cluster find, call and watch each other: names, handles, deaths."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from pd_cluster.mail import Mail
from pd_cluster.pools import KvPool
from pd_cluster.types import Message, WorkerId, encode

logger = logging.getLogger(__name__)

# All clusters on one Ray share this namespace; their actors' names begin with the cluster's name.
NAMESPACE = "pd-cluster"
COORDINATOR = "coordinator"


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every actor of a cluster is started with. `config` is a Config's dump, as JSON.

    `local`: the Ray under the cluster was started for it, and has one node.
    """

    config: str
    model_folder: str
    model_id: str
    secret: bytes
    local: bool
    kv_pool: KvPool


def actor_name(cluster_name: str, name: str) -> str:
    return f"{cluster_name}/{name}"


class Peers:
    """Handles of the cluster's other actors, by their names within the cluster.

    Callbacks come from a thread of its own, or from the mail's. Without `mail`, and to those to
    whom there is no line yet, messages go by Ray; they may then overtake each other.
    """

    def __init__(self, cluster_name: str, mail: Mail | None = None) -> None:
        self._cluster_name = cluster_name
        self._mail = mail
        # By name and life: a worker that was removed may come back by the same name, as another
        # actor.
        self._handles: dict[tuple[str, str], Any] = {}
        self._watched: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        self._callbacks = ThreadPoolExecutor(1, "peers")

    def handle(self, name: str, life: str = "") -> Any:
        """`life` is a worker's incarnation. Raises ValueError where there is no such actor."""
        key = name, life
        with self._lock:
            found = self._handles.get(key)
        if found is None:  # Ray is not asked under a lock: others that answer for Ray may want it
            found = ray.get_actor(actor_name(self._cluster_name, name), namespace=NAMESPACE)
            with self._lock:
                found = self._handles.setdefault(key, found)
        return found

    def post(self, worker: WorkerId, message: Message, on_lost: Callable[[], None]) -> None:
        """Sends a message to one life of a worker. `on_lost` may be called if that life is over;
        to be sure to hear of that, `watch` it.
        """
        data = encode(message)
        by_call = partial(self._post, worker, data, on_lost)
        self._send(str(worker), worker.name, worker.incarnation, data, by_call)

    def deliver(self, gateway: str, message: Message, on_lost: Callable[[], None]) -> None:
        """Sends a message to a gateway; `on_lost` as in `post`."""
        data = encode(message)
        by_call = partial(self._deliver, gateway, data, on_lost)
        self._send(gateway, gateway, "", data, by_call)

    def _send(
        self, recipient: str, name: str, life: str, data: bytes, by_call: Callable[[], None]
    ) -> None:
        if self._mail is not None and self._mail.send(recipient, data, by_call):
            return
        by_call()
        if self._mail is not None and self._mail.wanted(recipient):
            self._introduce(self._mail, recipient, name, life)

    def _introduce(self, mail: Mail, recipient: str, name: str, life: str) -> None:
        try:
            ref = self.handle(name, life).mail_address.remote()
        except (ValueError, RayError):
            return

        def told(future: Future[tuple[str, int]]) -> None:
            try:
                mail.dial(recipient, future.result())
            except RayError:
                pass  # it is gone, as `watch` tells

        self._when_done(ref, told)

    def _deliver(self, gateway: str, data: bytes, on_lost: Callable[[], None]) -> None:
        try:
            self.handle(gateway).deliver.remote(data)
        except (ValueError, RayError):
            self.forget(gateway)
            on_lost()

    def _post(self, worker: WorkerId, data: bytes, on_lost: Callable[[], None]) -> None:
        name, life = worker.name, worker.incarnation
        try:
            ref = self.handle(name, life).post.remote(life, data)
        except (ValueError, RayError):
            self.forget(name, life)
            on_lost()
            return

        def done(future: Future[bool]) -> None:
            try:
                accepted = future.result()
            except RayError:
                self.forget(name, life)
                accepted = False
            if not accepted:
                on_lost()

        self._when_done(ref, done)

    def tell_coordinator(self, message: Message, by_call: Callable[[], None]) -> None:
        """Sends a message to the coordinator: by mail where there is a line, else by `by_call`,
        which may be called later too, from another thread.
        """
        self._send(COORDINATOR, COORDINATOR, "", encode(message), by_call)

    def watch_coordinator(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` once when this life of the coordinator ends; it comes back."""
        self._watch(COORDINATOR, "", on_lost)

    def watch(self, worker: WorkerId, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` once when that life of the worker ends; watching twice is watching
        once.
        """
        self._watch(worker.name, worker.incarnation, on_lost)

    def watch_gateway(self, name: str, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` once when the gateway of that name ends; it may come back."""
        self._watch(name, "", on_lost)

    def _watch(self, name: str, life: str, on_lost: Callable[[], None]) -> None:
        key = name, life
        with self._lock:
            if key in self._watched:
                return
            self._watched[key] = None

        def done(_: Future[Any]) -> None:
            with self._lock:
                self._watched.pop(key, None)
            self.forget(name, life)
            on_lost()

        try:
            ref = self.handle(name, life).watch.remote(*([life] if life else []))
        except (ValueError, RayError):
            with self._lock:
                self._watched.pop(key, None)
            self.forget(name, life)
            on_lost()
            return
        with self._lock:
            if key in self._watched:
                self._watched[key] = ref
        self._when_done(ref, done)

    def _when_done(self, ref: Any, done: Callable[[Future[Any]], None]) -> None:
        """Calls back from a thread of ours: Ray's own, which tells, answers `get_actor` too, and so
        must wait for nobody who may be in that.
        """

        def guarded(future: Future[Any]) -> None:
            try:
                done(future)
            except Exception:
                logger.exception("could not handle the end of a call")

        ref.future().add_done_callback(lambda future: self._callbacks.submit(guarded, future))

    def forget(self, name: str, life: str = "") -> None:
        with self._lock:
            self._handles.pop((name, life), None)
