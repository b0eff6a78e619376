"""Actors find and watch each other; Ray's own thread, which answers all, never waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from pd_cluster.peers import Peers
from pd_cluster.types import WorkerId

WAIT_S = 10.0
WORKER = WorkerId("decode-0", "x")


class FakeRay:
    """One thread that completes calls and answers `get_actor`, as Ray's does."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.watched: Future[None] = Future()
        self.asked: list[str] = []
        self.before = lambda name: None  # called by who asks for an actor

    def get_actor(self, name: str, namespace: str) -> Any:
        self.before(name)
        self.asked.append(name)
        self.thread.submit(lambda: None).result(WAIT_S)
        ref = SimpleNamespace(future=lambda: self.watched)
        return SimpleNamespace(watch=SimpleNamespace(remote=lambda *_: ref), name=name)

    def end_of_worker(self) -> None:
        self.thread.submit(self.watched.set_exception, RayActorError())


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray, "get_actor", fake.get_actor)
    return fake


def test_an_actor_is_asked_for_while_another_is_lost(fake_ray: FakeRay) -> None:
    peers, lost = Peers("pd"), threading.Event()
    peers.watch(WORKER, lost.set)
    fake_ray.before = lambda name: fake_ray.end_of_worker() if "gateway" in name else None
    assert peers.handle("gateway-0").name == "pd/gateway-0"
    assert lost.wait(WAIT_S)


def test_who_hears_of_a_loss_may_ask_for_another_actor(fake_ray: FakeRay) -> None:
    peers, found = Peers("pd"), Future[str]()

    def lost() -> None:
        try:
            found.set_result(peers.handle("gateway-0").name)
        except BaseException as error:
            found.set_exception(error)

    peers.watch(WORKER, lost)
    fake_ray.end_of_worker()
    assert found.result(2 * WAIT_S) == "pd/gateway-0"


def test_a_handle_is_asked_for_once_until_it_is_forgotten(fake_ray: FakeRay) -> None:
    peers = Peers("pd")
    first = peers.handle("gateway-0")
    assert peers.handle("gateway-0") is first
    peers.forget("gateway-0")
    assert peers.handle("gateway-0") is not first
    assert fake_ray.asked == ["pd/gateway-0"] * 2
