"""`ray up` on two hosts that share nothing but a network, prefill on one and decode on the other.

The order of the tests is that of a cluster's life: the last one takes it down.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.model.reference import Reference, compare
from tests.multihost.conftest import Deployed, poll
from tests.multihost.hosts import Host

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(900)]

# Keys and values of all layers, float32.
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
CUT_S = 5.0


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


def prompt(tokenizer: Tokenizer, subject: str, length: int) -> list[int]:
    """No two subjects begin with the same token: none finds another's pages."""
    lines = "".join(f"{subject}: line {number} was read. " for number in range(length))
    return tokenizer.encode(lines)[:length]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


def actors(host: Host) -> list[str]:
    return sorted(line for line in host.processes() if line.startswith("ray::"))


def transports(host: Host) -> set[str]:
    """How UCX says that it sends the messages of processes on that host."""
    return set(host.run(r"grep -ohE 'tag\([^)]*\)' /tmp/ucx-*.log | sort -u").split())


def test_pages_cross_between_the_hosts(
    deployed: Deployed, tokenizer: Tokenizer, reference: Reference
) -> None:
    workers = [
        sum("WorkerActor" in line for line in actors(host)) for host in deployed.network.hosts
    ]
    assert workers == [1, 1], [actors(host) for host in deployed.network.hosts]

    for subject, length in (("Poems", 1), ("Letters", 40), ("Books", 400)):
        ids = prompt(tokenizer, subject, length)
        moved, received = deployed.transfer_bytes(), deployed.worker.bytes_received()
        tokens = deployed.generate(ids, 6)
        assert len(tokens) == 6
        compare(tokens, ids, reference)
        moved = deployed.transfer_bytes() - moved
        assert moved == length * TOKEN_BYTES
        assert deployed.worker.bytes_received() - received >= moved
    # The sender tells: nothing went through memory that the hosts could share.
    assert transports(deployed.head) == {"tag(tcp/eth0)"}

    # What decode holds is not sent again.
    moved = deployed.transfer_bytes()
    assert deployed.generate(ids, 6) == tokens
    assert deployed.transfer_bytes() == moved
    deployed.settle()


def test_a_cable_is_pulled_for_a_while(
    deployed: Deployed, tokenizer: Tokenizer, reference: Reference
) -> None:
    prompts = [prompt(tokenizer, each, 500) for each in ("Spring", "Summer", "Autumn", "Winter")]
    requests = [deployed.ask(ids, 24) for ids in prompts]
    poll(
        lambda: sum(each["in_flight"] for each in deployed.info()["workers"]) > 0,
        "nothing is under way",
        deployed.info,
    )
    with deployed.network.cut(deployed.worker):
        time.sleep(CUT_S)  # the length of the cut, not a wait for something
    answers = [deployed.answer(request) for request in requests]
    print("answers after the cut:", [answer.status for answer in answers])
    for ids, answer in zip(prompts, answers, strict=True):
        if answer.status == 200:
            assert len(answer.tokens) == 24
            compare(answer.tokens, ids, reference)
        else:
            assert answer.status in (503, 504), answer
            assert answer.body["error"]["message"], answer
    later = prompt(tokenizer, "Later", 60)
    compare(deployed.generate(later, 6), later, reference)
    deployed.settle()


def test_a_worker_more(deployed: Deployed, tokenizer: Tokenizer) -> None:
    """The commands for scaling, as they stand; the new worker lands where decode may run."""
    deployed.run_blocks(lambda block: "pd-cluster scale" in block)
    decode = [each for each in deployed.info()["workers"] if each["role"] == "decode"]
    assert len(decode) == 2, deployed.info()
    assert sum("WorkerActor" in line for line in actors(deployed.worker)) == 2
    deployed.generate(prompt(tokenizer, "More", 20), 2)


def test_ray_down_leaves_no_process(deployed: Deployed) -> None:
    deployed.run_blocks(lambda block: "ray down" in block)
    for host in deployed.network.hosts:

        def bare(host: Host = host) -> bool:
            return all("sshd" in line for line in host.processes())

        poll(bare, f"{host.name} is not as before", host.processes)
