"""The operator's routes for numbers of workers."""

from __future__ import annotations

import pytest

from pd_cluster.observability.snapshots import ClusterSnapshot
from pd_cluster.scaling import Counts, Refusal, ScalingStatus, Wish

pytestmark = pytest.mark.anyio

STATUS = ScalingStatus(
    counts=Counts(prefill=2, decode=1, gateway=1),
    members={"prefill-0": "serving", "prefill-1": "starting"},
    wishes=1,
    steady=False,
)


async def test_a_wish_is_taken(client, cluster):
    cluster.scaled = STATUS
    reply = await client.post("/admin/scale", json={"prefill": 2, "gateways": 1})
    assert reply.status_code == 202
    assert cluster.wishes == [Wish(prefill=2, gateway=1)]
    assert reply.json() == {
        "counts": {"prefill": 2, "decode": 1, "gateways": 1},
        "members": {"prefill-0": "serving", "prefill-1": "starting"},
        "wishes": 1,
        "steady": False,
        "failure": "",
    }
    assert (await client.get("/admin/scale")).json() == reply.json()
    reply = await client.post("/admin/workers/prefill-1/drain")
    assert reply.status_code == 202
    assert cluster.wishes[1:] == [Wish(drain="prefill-1")]


@pytest.mark.parametrize("status", [400, 404, 503])
async def test_a_wish_is_refused(client, cluster, status):
    cluster.scaled = Refusal(status=status, message="decode-0 is the last")
    reply = await client.post("/admin/workers/decode-0/drain")
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == "decode-0 is the last"


@pytest.mark.parametrize("body", ["{", "[1]", "{}", '{"prefill": 0}', '{"decode": 1.5}'])
async def test_nonsense_goes_no_further(client, cluster, body):
    reply = await client.post("/admin/scale", content=body)
    assert reply.status_code == 400
    assert not cluster.wishes


async def test_nothing_is_known_yet(client):
    assert (await client.get("/admin/scale")).status_code == 503


async def test_workers_are_told_with_their_state(client, cluster):
    (worker, *_) = (await client.get("/admin/workers")).json()["workers"]
    assert worker["state"] == "ready"
    assert worker["worker"]["name"] == cluster.snapshots.coordinator.workers[0].worker.name
    cluster.snapshots = ClusterSnapshot()
    assert (await client.get("/admin/workers")).status_code == 503


async def test_only_for_operators(app, make_client):
    async with make_client(app, host="10.0.0.1") as client:
        for path in ("/admin/scale", "/admin/workers/decode-0/drain"):
            assert (await client.post(path, json={"prefill": 2})).status_code == 403
