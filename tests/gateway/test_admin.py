from __future__ import annotations

import pytest

from pd_cluster.config import validate_config
from pd_cluster.observability.snapshots import ClusterSnapshot

pytestmark = pytest.mark.anyio


async def test_health_and_ready(client, cluster):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    cluster.not_ready = "no decode worker is ready"
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode worker is ready"
    assert response.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(client, cluster, path):
    cluster.config = validate_config({"admin_key": "s3cret"})
    body = {"text": "abcd"}
    rates = []
    for hit in (0, 3, 3):
        cluster.prefill_hit = hit
        assert (await client.post("/generate", json=body)).status_code == 200
        rates.append((await client.get(path)).json()["cache_hit_rate"])
    assert rates == [0.0, 3 / 8, 6 / 12]
    info = (await client.get(path)).json()
    assert info["model"] == "tiny"
    assert info["context_length"] == 256
    assert info["totals"]["requests"] == 3
    assert info["workers"][0]["worker"]["name"] == "decode-0"
    assert info["coordinator"]["workers"][0]["state"] == "ready"
    assert info["config"]["page_size"] == 1
    assert info["versions"].keys() == {"pd_cluster", "python", "torch", "ray"}


async def test_the_key_is_not_told(cluster, make_app, make_client):
    cluster.config = validate_config({"admin_key": "s3cret"})
    async with make_client(make_app(cluster)) as client:
        text = (await client.get("/server_info")).text
    assert "s3cret" not in text
    assert "admin_key" not in text


async def test_server_info_without_a_coordinator(client, cluster):
    cluster.snapshots = ClusterSnapshot()
    info = (await client.get("/server_info")).json()
    assert info["coordinator"] is None
    assert info["workers"] == []
    assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(client, cluster, method):
    response = await client.request(method, "/flush_cache")
    assert response.json() == {"success": True, "workers": {"decode-0": {"evicted": 3}}}
    await client.request(method, "/flush_cache", params={"role": "prefill"})
    assert cluster.flushed == [None, "prefill"]
    response = await client.request(method, "/flush_cache", params={"role": "gateway"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "role"
    assert len(cluster.flushed) == 2


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.9.9.9", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("10.0.0.1", 403),
        ("::ffff:10.0.0.1", 403),
        ("testclient", 403),
    ],
)
async def test_without_a_key_only_loopback(app, cluster, make_client, host, status):
    async with make_client(app, host=host) as client:
        response = await client.post("/flush_cache")
    assert response.status_code == status
    assert len(cluster.flushed) == (status == 200)
    if status == 403:
        assert "loopback" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic s3cret", 401),
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
    ],
)
async def test_with_a_key_only_with_it(cluster, make_app, make_client, header, status):
    cluster.config = validate_config({"admin_key": "s3cret"})
    for host in ("127.0.0.1", "10.0.0.1"):
        async with make_client(make_app(cluster), host=host) as client:
            headers = {"authorization": header} if header else {}
            response = await client.post("/flush_cache", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(cluster.flushed) == (2 if status == 200 else 0)
