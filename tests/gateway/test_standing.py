"""What a client may say of its request's urgency, and whose it is: as the cluster is told."""

from __future__ import annotations

import pytest

from pd_cluster.config import validate_config

pytestmark = pytest.mark.anyio
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"text": "Hi"},
}
SALTS = {"/generate": "extra_key"}
URGENT = {"enable_priority_scheduling": True, "schedule_policy": "routing-key"}


@pytest.fixture
def serving(cluster, make_app, make_client):
    def make(**settings):
        cluster.config = validate_config(settings)
        return make_client(make_app(cluster))

    return make


@pytest.mark.parametrize("path", ROUTES)
async def test_priority_and_routing_key_reach_coordinator_and_worker(serving, cluster, path):
    async with serving(**URGENT) as client:
        body = {**ROUTES[path], "priority": -3, "routing_key": "session-7"}
        assert (await client.post(path, json=body)).status_code == 200
    (asked,) = cluster.placed
    assert (asked.priority, asked.routing_key, asked.tenant) == (-3, "session-7", "")
    assert cluster.started[0].priority == -3


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", 2**31),
        ("routing_key", ""),
        ("routing_key", 7),
        ("routing_key", "k" * 257),
        ("tenant", "mine"),
    ],
)
async def test_a_bad_wish_is_a_400_that_names_the_field(serving, cluster, path, field, value):
    async with serving(**URGENT) as client:
        response = await client.post(path, json={**ROUTES[path], field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert not cluster.placed


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("priority", 1, "--enable-priority-scheduling"),
        ("routing_key", "x", "--schedule-policy routing-key"),
    ],
)
async def test_what_would_have_no_effect_is_refused(serving, cluster, field, value, option):
    async with serving() as client:
        response = await client.post("/generate", json={"text": "Hi", field: value})
        assert response.status_code == 400
        assert option in response.json()["error"]["message"]
        assert not cluster.placed
        # What asks for nothing is taken.
        body = {"text": "Hi", "priority": 0, "routing_key": None}
        assert (await client.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize("setting", ["schedule_policy", "retraction_policy"])
async def test_any_policy_that_looks_at_priorities_takes_them(serving, cluster, setting):
    async with serving(**{setting: "priority"}) as client:
        body = {"text": "Hi", "priority": 5}
        assert (await client.post("/generate", json=body)).status_code == 200
    assert cluster.placed[0].priority == 5


@pytest.mark.parametrize("path", ROUTES)
async def test_tenants_are_told_apart_by_salt_where_there_are_no_keys(serving, cluster, path):
    salt = SALTS.get(path, "cache_salt")
    async with serving() as client:
        for value in ("one", "two", "one"):
            await client.post(path, json={**ROUTES[path], salt: value})
    first, second, third = (each.tenant for each in cluster.placed)
    assert first == third != second
    assert "one" not in first


async def test_a_key_is_a_tenant_whatever_its_salts_and_is_never_told(serving, cluster):
    async with serving(api_keys=["secret-one", "secret-two"]) as client:
        for key, salt in (("secret-one", "a"), ("secret-one", "b"), ("secret-two", "a")):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "Hi", "cache_salt": salt}
            await client.post("/v1/completions", json=body, headers=headers)
    first, second, other = (each.tenant for each in cluster.placed)
    assert first == second != other
    assert all(first)
    assert "secret" not in repr(cluster.placed) + repr(cluster.started)
