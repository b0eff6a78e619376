"""KV events over ZMQ, as vLLM and SGLang publish them, for routers that are not ours.

A message is [topic, number (8 bytes, big-endian), batch (msgpack)] on a PUB socket. A subscriber
that sees a gap sends the first number that it lacks to the replay socket, and gets the batches from
there on as [empty, number, batch], then one with the number -1. A batch that is no longer kept is
missing there: then what is held is learnt from the first batch with AllBlocksCleared, or not at
all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from pd_cluster.cache.block_log import BlockLog, EventStream
from pd_cluster.cache.events import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    CacheEvent,
    KvEvent,
    KvEventBatch,
    StorageHolds,
    Tier,
    encode_batch,
)
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.cache.tiers import TieredCache
from pd_cluster.config import KvEventsConfig
from pd_cluster.types import Role

# The number that says that a replay is over.
_END = (-1).to_bytes(8, "big", signed=True)


def own_port(endpoint: str, role: Role, name: str) -> str:
    """The endpoint of worker `name`, e.g. "decode-1": prefill workers have even steps from the
    configured port, decode workers odd ones."""
    base, _, port = endpoint.rpartition(":")
    step = 2 * int(name.rpartition("-")[2]) + (role == "decode")
    return f"{base}:{int(port) + step}"


class KvPublisher:
    """Sends batches from a thread of its own; `publish` never waits.

    `endpoint` and `replay_endpoint` are bound; port 0 takes any free one, and the attributes of
    these names say which.
    """

    def __init__(
        self, config: KvEventsConfig, endpoint: str, replay_endpoint: str | None = None
    ) -> None:
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay = self._context.socket(zmq.ROUTER)
        # What wakes the thread: sockets belong to it alone.
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        try:
            self._pub.bind(endpoint)
            if replay_endpoint is not None:
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"kv_events_config: {endpoint}: {error}") from error
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Numbers the events as one batch and sends it. From one thread only."""
        if events:
            self._outbox.put(encode_batch(KvEventBatch(time.time(), list(events))))
            self._wake.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        self._closing.set()
        self._wake.send(b"")
        self._thread.join()
        self._wake.close(0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
                if self._closing.is_set():
                    return
                batch = self._outbox.get()
                self._kept.append((number, batch))
                self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), batch])
                number += 1
            if self._replay in ready:
                self._answer()

    def _answer(self) -> None:
        client, *_, wanted = self._replay.recv_multipart()
        if len(wanted) == 8:
            first = int.from_bytes(wanted, "big")
            for number, batch in self._kept:
                if number >= first:
                    self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), batch])
        self._replay.send_multipart([client, b"", _END, b""])


class KvEvents:
    """What is published of one worker's cache, of its host tier too."""

    def __init__(self, cache: PrefixCache, publisher: KvPublisher, block_size: int) -> None:
        caches = {MEDIUM_DEVICE: cache}
        if isinstance(cache, TieredCache):
            caches[MEDIUM_HOST] = cache.host
        self._stream = EventStream(
            [
                BlockLog(each.pool.num_pages, each.page_size, block_size, medium)
                for medium, each in caches.items()
            ]
        )
        self._publisher = publisher

    def tell(self, events: Sequence[CacheEvent]) -> None:
        """Publishes what `take_events` of the cache gave, as one batch."""
        device = [event for event in events if _tier_of(event) == "device"]
        host = [event for event in events if _tier_of(event) == "host"]
        blocks = self._stream.apply(MEDIUM_DEVICE, device)[1]
        self._publisher.publish(blocks + self._stream.apply(MEDIUM_HOST, host)[1])


def _tier_of(event: CacheEvent) -> Tier:
    return "host" if isinstance(event, StorageHolds) else event.tier


def make_kv_events(
    config: KvEventsConfig | None, role: Role, name: str, cache: PrefixCache
) -> KvEvents | None:
    """None without a configuration. Raises ValueError where a port is taken."""
    if config is None:
        return None
    replay = config.replay_endpoint
    publisher = KvPublisher(
        config,
        own_port(config.endpoint, role, name),
        None if replay is None else own_port(replay, role, name),
    )
    return KvEvents(cache, publisher, config.block_size)
