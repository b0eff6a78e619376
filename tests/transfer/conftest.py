from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from pd_transfer import FakeNetwork, agent, nixl_xfer_handle
from pd_transfer.bench_hosts import NoNamespaces, ip, namespaces, two_hosts
from tests.transfer.node import PAGE, PAGES, Node, RemoteNode, closing, eventually, rows

Made = TypeVar("Made")

SECRET = b"a secret of the cluster"


class World:
    """Two nodes that know one secret. The initiator "i" is here, the target "t" anywhere.

    `kind` is "fake", "ucx" or "nixl" (both in this process), or "processes" (the target in
    another).
    """

    def __init__(self, kind: str, later: Callable[[Any], Any]) -> None:
        self.kind = kind
        self.later = later
        self.network = FakeNetwork()
        self.i: Node = self.local("i", seed=1)
        self.t: Any = self.remote("t", seed=2)

    def local(self, name: str, *, secret: bytes = SECRET, **shape: int) -> Node:
        if self.kind == "fake":
            made = agent("fake", name=name, secret=secret, network=self.network)
        elif self.kind == "nixl":
            made = agent("nixl", name=name, secret=secret)
        else:
            made = agent("ucx", name=name, secret=secret)
        return self.later(Node(self.later(made), **shape))

    def remote(self, name: str, *, secret: bytes = SECRET, **shape: int) -> Any:
        if self.kind != "processes":
            return self.local(name, secret=secret, **shape)
        return self.later(RemoteNode(name=name, secret=secret, options={}, **shape))

    def meet(self) -> None:
        self.i.add(self.t.metadata())

    def handle(
        self,
        operation: str = "WRITE",
        local: Any = (0,),
        remote: Any = (0,),
        message: bytes = b"",
    ) -> nixl_xfer_handle:
        """A transfer of whole pages between i and t."""
        mine = self.i.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.i.memory, PAGE), "DRAM")
        theirs = self.i.agent.prep_xfer_dlist("t", self.target_rows(), "DRAM")
        return self.i.agent.make_prepped_xfer(
            operation, mine, np.asarray(local), theirs, np.asarray(remote), notif_msg=message
        )

    def target_rows(self) -> npt.NDArray[np.uint64]:
        table = np.zeros((PAGES, 3), np.uint64)
        table[:, 0] = self.t.address() + np.arange(PAGES) * PAGE
        table[:, 1] = PAGE
        return table

    def finish(self, handle: nixl_xfer_handle) -> str:
        """Wait for the handle's end, by nothing but asking: "DONE" or its exception."""
        eventually(lambda: self.i.agent.check_xfer_state(handle) != "PROC")
        return self.i.agent.check_xfer_state(handle)

    def run(self, handle: nixl_xfer_handle) -> str:
        self.i.agent.transfer(handle)
        return self.finish(handle)


@pytest.fixture
def later() -> Iterator[Callable[[Any], Any]]:
    yield from closing()


# The wheel and UCXX must not share a process, so test_nixl.py runs the suite in one of its own.
KINDS = os.environ.get("PD_TRANSFER_CONTRACT", "fake ucx processes").split()

# What upstream's one-sided transfers cannot do.
UPSTREAM_CANNOT = {
    "test_counters_tell_descriptors_from_merged_runs": "the target's NIXL counts nothing",
    "test_memory_that_was_deregistered_since_is_refused": "the target's NIXL checks nothing",
    "test_a_stale_generation_is_refused": "the target's NIXL checks nothing",
    "test_another_secret_is_refused": "NIXL has no authentication",
    "test_a_target_notices_its_dead_initiator": "the target's NIXL does not know its initiators",
    "test_a_dead_peer_is_noticed": "NIXL's agents of one process do not see each other end",
    "test_a_dead_peer_may_be_followed_by_one_of_its_name": "as for noticing the dead",
    "test_removed_and_added_again_is_another_peer": "the target's NIXL knows of no initiator",
    "test_events_wake_the_application": "as for noticing the dead",
}


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, later: Callable[[Any], Any]) -> World:
    if request.param == "nixl" and request.node.originalname in UPSTREAM_CANNOT:
        pytest.skip(UPSTREAM_CANNOT[request.node.originalname])
    return World(request.param, later)


# Hosts: network namespaces, joined by nothing but virtual cables.


@contextlib.contextmanager
def _or_skip(made: contextlib.AbstractContextManager[Made]) -> Iterator[Made]:
    with contextlib.ExitStack() as stack:
        try:
            there = stack.enter_context(made)
        except NoNamespaces as reason:
            pytest.skip(str(reason))
        yield there


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Prefixes of commands that are to run on either host."""
    with _or_skip(two_hosts()) as prefixes:
        yield prefixes


@pytest.fixture
def neighbour() -> Iterator[tuple[list[str], str, str]]:
    """A host beside this one: a prefix of commands that are to run there, our address and its."""
    name = f"pdn{os.getpid()}"
    with _or_skip(namespaces(name)):
        # A network of this run's own: two may be under way at once.
        net = f"10.{80 + os.getpid() // 256 % 32}.{os.getpid() % 256}"
        end, ours, theirs = f"w{os.getpid()}", f"{net}.1", f"{net}.2"
        # Goes with the namespace that the other end is in.
        ip("link", "add", end, "type", "veth", "peer", "name", end, "netns", name)
        for where, address in ([], ours), (["-n", name], theirs):
            ip(*where, "address", "add", f"{address}/24", "dev", end)
            ip(*where, "link", "set", end, "up")
        yield ["ip", "netns", "exec", name], ours, theirs
