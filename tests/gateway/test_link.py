"""How a gateway hears from the coordinator: by mail, by a call, or that it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from pd_cluster.errors import Unavailable
from pd_cluster.gateway.actor import RayLink
from pd_cluster.types import AttemptId, Placement, PlaceRequest, Rejection, WorkerId, encode

pytestmark = pytest.mark.anyio

REQUEST = PlaceRequest(
    attempt=AttemptId("a", 1), gateway="gateway-0", prompt_len=3, max_tokens=3, timeout_s=9.0
)
PLACEMENT = Placement(
    attempt=REQUEST.attempt, prefill=WorkerId("prefill-0", "x"), decode=WorkerId("decode-0", "x")
)


class FakePeers:
    """Keeps what is sent, and whom to tell of the coordinator's end."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Callable[[], None]]] = []
        self.on_lost: Callable[[], None] = lambda: None
        self.reply: Any = PLACEMENT

    def tell_coordinator(self, message: Any, by_call: Callable[[], None]) -> None:
        self.sent.append((message, by_call))

    def watch_coordinator(self, on_lost: Callable[[], None]) -> None:
        self.on_lost = on_lost

    def forget(self, name: str) -> None:
        pass

    def handle(self, name: str) -> Any:
        async def place(data: bytes) -> bytes:
            assert data == encode(REQUEST)
            if isinstance(self.reply, Exception):
                raise self.reply
            return encode(self.reply)

        return SimpleNamespace(place=SimpleNamespace(remote=place))


async def asked() -> tuple[FakePeers, RayLink, asyncio.Task]:
    peers = FakePeers()
    link = RayLink(peers, asyncio.get_running_loop())
    return peers, link, await again(peers, link)


async def again(peers: FakePeers, link: RayLink) -> asyncio.Task:
    peers.sent.clear()
    task = asyncio.create_task(link.place(REQUEST))
    await asyncio.sleep(0)
    ((message, _),) = peers.sent
    assert message == REQUEST
    return task


async def test_the_answer_comes_by_mail_and_once_more():
    _, link, task = await asked()
    link.answered(Rejection(attempt=AttemptId("b", 1), status=503, reason="x", message="x"))
    link.answered(PLACEMENT)
    link.answered(PLACEMENT)
    assert await task == PLACEMENT
    link.answered(PLACEMENT)  # nobody waits any more


async def test_what_mail_hands_back_goes_by_call():
    peers, _, task = await asked()
    peers.sent[0][1]()
    assert await task == PLACEMENT


async def test_a_call_that_fails_is_a_coordinator_that_cannot_be_reached():
    peers, _, task = await asked()
    peers.reply = RayActorError()
    peers.sent[0][1]()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await task


async def test_who_waits_for_a_coordinator_that_ends_asks_again():
    peers, link, task = await asked()
    peers.on_lost()
    with pytest.raises(Unavailable, match="it ended"):
        await task
    task = await again(peers, link)
    link.answered(PLACEMENT)
    assert await task == PLACEMENT


async def test_who_gives_up_is_forgotten():
    peers, link, task = await asked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    link.answered(PLACEMENT)
    peers.on_lost()
    await asyncio.sleep(0)
