"""Which routes want which key."""

from __future__ import annotations

import pytest

from pd_cluster.config import validate_config

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"text": "Hi"},
}


@pytest.fixture
def guarded(cluster, make_app, make_client):
    """Clients of an application with these settings."""

    def make(host="10.0.0.1", **settings):
        cluster.config = validate_config(settings)
        return make_client(make_app(cluster), host=host)

    return make


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("one", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer boss", 200),
    ],
)
async def test_api_keys(guarded, cluster, path, header, status):
    async with guarded(api_keys=["one", "two"], admin_key="boss") as client:
        headers = {"authorization": header} if header else {}
        response = await client.post(path, json=ROUTES[path], headers=headers)
    assert response.status_code == status
    assert bool(cluster.placed) == (status == 200)
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code", "request_id"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


async def test_models_need_a_key_too(guarded):
    async with guarded(api_keys=["one"]) as client:
        assert (await client.get("/v1/models")).status_code == 401
        headers = {"authorization": "Bearer one"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/metrics", "/openapi.json"])
async def test_probes_are_open(guarded, path):
    async with guarded(api_keys=["one"]) as client:
        assert (await client.get(path)).status_code == 200


async def test_server_info_is_open_to_this_machine(guarded):
    """`pd-cluster status` asks it without a key."""
    for host, status in (("127.0.0.1", 200), ("10.0.0.1", 401)):
        async with guarded(host, api_keys=["one"]) as client:
            response = await client.get("/server_info")
            assert response.status_code == status
            assert "one" not in response.text.replace("none", "")


async def test_an_api_key_is_no_admin_key(guarded, cluster):
    async with guarded(api_keys=["one"], admin_key="boss") as client:
        for path in ("/flush_cache", "/admin/requests/x"):
            response = await client.get(path, headers={"authorization": "Bearer one"})
            assert response.status_code == 401
    async with guarded(api_keys=["one"]) as client:
        response = await client.get("/flush_cache", headers={"authorization": "Bearer one"})
        assert response.status_code == 403
    assert cluster.flushed == []


async def test_without_api_keys_all_may_ask(guarded):
    async with guarded(admin_key="boss") as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
