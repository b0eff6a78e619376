from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pd_transfer import FakeNetwork, agent, nixl_xfer_handle
from tests.transfer.node import PAGE, PAGES, Node, RemoteNode, closing, eventually, rows

SECRET = b"a secret of the cluster"


class World:
    """Two nodes that know one secret. The initiator "i" is here, the target "t" anywhere.

    `kind` is "fake", "ucx" (both in this process) or "processes" (the target in another).
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


@pytest.fixture(params=["fake", "ucx", "processes"])
def world(request: pytest.FixtureRequest, later: Callable[[Any], Any]) -> World:
    return World(request.param, later)
