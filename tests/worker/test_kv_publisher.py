"""What a router that knows vLLM's events gets from us, over real sockets of this host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from pd_cluster.cache.block_hash import prefix_hashes
from pd_cluster.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    decode_batch,
)
from pd_cluster.cache.eviction import make_eviction_policy
from pd_cluster.cache.page_pool import PagePool
from pd_cluster.cache.prefix_cache import PrefixCache
from pd_cluster.config import KvEventsConfig
from pd_cluster.worker.kv_publisher import KvEvents, KvPublisher, make_kv_events, own_port
from tests.cache.tiered import Tiers

ANY = "tcp://127.0.0.1:*"
PATIENCE_MS = 30_000


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher(KvEventsConfig(topic="kv", buffer_steps=3), ANY, ANY)
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def subscribe(context: zmq.Context[zmq.Socket[bytes]], publisher: KvPublisher) -> zmq.Socket[bytes]:
    """A subscriber that is known to the publisher: PUB drops what nobody has asked for."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 20)
    socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
    socket.connect(publisher.endpoint)
    for _ in range(PATIENCE_MS // 20):
        publisher.publish([AllBlocksCleared()])
        try:
            socket.recv_multipart()
        except zmq.Again:
            continue
        break
    # The rest of the greetings, which were all sent before a batch that can be told from them.
    publisher.publish([BlockRemoved([0])])
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    while receive(socket)[1] != [BlockRemoved([0])]:
        pass
    return socket


def receive(socket: zmq.Socket[bytes]) -> tuple[int, list[KvEvent]]:
    topic, number, batch = socket.recv_multipart()
    assert topic == b"kv"
    return int.from_bytes(number, "big"), list(decode_batch(batch).events)


def replay(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KvPublisher, first: bytes
) -> list[int]:
    numbers = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", first])
        while True:
            empty, number, batch = dealer.recv_multipart()
            assert empty == b""
            value = int.from_bytes(number, "big", signed=True)
            if value < 0:
                assert batch == b""
                return numbers
            assert decode_batch(batch).events
            numbers.append(value)


def test_what_the_cache_does_is_published_in_numbered_batches(
    publisher: KvPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    cache = PrefixCache(PagePool(300), 1, make_eviction_policy("lru", {}), record_events=True)
    events = KvEvents(cache, publisher, 64)
    tokens = np.arange(150, dtype=np.int32)
    with subscribe(context, publisher) as socket:
        cache.finish(tokens, cache.allocate(150, 0.0), cache.tree.root, now=0.0)
        events.tell(cache.take_events())
        events.tell(cache.take_events())
        cache.evict(1, 1.0)
        events.tell(cache.take_events())
        first, stored = receive(socket)
        second, removed = receive(socket)
    names = prefix_hashes(tokens)
    assert second == first + 1, "nothing is sent where nothing has happened"
    assert stored == [
        BlockStored(names, None, list(range(128)), 64, None, "GPU"),
    ]
    assert removed == [BlockRemoved(names, "GPU")]


def test_blocks_of_the_host_tier_have_its_medium(
    publisher: KvPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    tiers = Tiers(device=16, host=32, record_events=True, storage={})
    events = KvEvents(tiers.cache, publisher, 4)
    tokens = np.arange(8, dtype=np.int32)
    names = prefix_hashes(tokens, None, 4)
    with subscribe(context, publisher) as socket:
        tiers.run(tokens)
        tiers.drain()
        events.tell(tiers.cache.take_events())
        _, stored = receive(socket)
        tiers.cache.evict(16, 9.0)
        events.tell(tiers.cache.take_events())
        _, removed = receive(socket)
    values = list(range(8))
    # What storage holds is not told: it forgets without a word.
    assert stored == [
        BlockStored(names, None, values, 4, None, "GPU"),
        BlockStored(names, None, values, 4, None, "CPU"),
    ]
    assert removed == [BlockRemoved(names, "GPU")]


def test_missed_batches_are_sent_again_as_far_as_they_are_kept(
    publisher: KvPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with subscribe(context, publisher) as socket:
        for block in range(1, 6):
            publisher.publish([BlockRemoved([block])])
        last = [receive(socket) for _ in range(5)][-1][0]
    assert replay(context, publisher, (last - 1).to_bytes(8, "big")) == [last - 1, last]
    assert replay(context, publisher, (0).to_bytes(8, "big")) == [last - 2, last - 1, last]
    assert replay(context, publisher, (last + 1).to_bytes(8, "big")) == []
    assert replay(context, publisher, b"not a number") == []


def test_each_worker_has_a_port_of_its_own() -> None:
    base = "tcp://127.0.0.1:5557"
    names = [("prefill", "prefill-0"), ("decode", "decode-0"), ("prefill", "prefill-1")]
    ports = [own_port(base, role, name) for role, name in names]  # type: ignore[arg-type]
    assert ports == [base, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5559"]


def test_a_port_that_is_taken_is_an_error_that_names_it(publisher: KvPublisher) -> None:
    with pytest.raises(ValueError, match=f"kv_events_config: {publisher.endpoint}"):
        KvPublisher(KvEventsConfig(), publisher.endpoint)


def test_nothing_is_published_unless_asked_for() -> None:
    cache = PrefixCache(PagePool(4), 1, make_eviction_policy("lru", {}))
    assert make_kv_events(None, "prefill", "prefill-0", cache) is None
