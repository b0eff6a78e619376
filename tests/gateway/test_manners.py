"""Time limits, keep-alives, a graceful end, request ids, stories, and what the log says."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from pd_cluster.config import validate_config
from pd_cluster.gateway.gate import Gate
from pd_cluster.gateway.sse import KEEP_ALIVE
from pd_cluster.types import AttemptId, Output
from tests.gateway.conftest import Call, serve

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tight(cluster):
    """Settings of their own, for the application and the driver under it."""

    def change(**settings):
        cluster.config = validate_config(settings)
        cluster.driver.config = cluster.config

    return change


# --- time ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_the_clients_timeout_is_named(client, cluster, path):
    cluster.gates[0] = asyncio.Event()
    body = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "a"}, GENERATE: {"text": "a"}}
    response = await client.post(path, json={**body[path], "timeout": 0.01})
    assert response.status_code == 504
    error = response.json()["error"]
    assert "timeout (0.01 s)" in error["message"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert cluster.idle


async def test_the_servers_limit_bounds_the_clients(client, cluster, tight):
    tight(timeouts={"request_s": 0.01})
    cluster.gates[0] = asyncio.Event()
    response = await client.post(COMPLETIONS, json={"prompt": "a", "timeout": 1000})
    assert response.status_code == 504
    assert "timeouts.request_s (0.01 s)" in response.json()["error"]["message"]


# --- keep-alives ---


async def next_chunk(call) -> bytes:
    while True:
        message = await call.next()
        if message["type"] == "http.response.body" and message.get("body"):
            return message["body"]


async def test_a_stream_that_waits_is_kept_alive(cluster, tight, make_app):
    tight(timeouts={"keepalive_s": 0.01})
    cluster.gates[0], cluster.gates[1] = asyncio.Event(), asyncio.Event()
    call = Call(make_app(cluster), COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 2})
    assert (await call.next())["status"] == 200
    assert await next_chunk(call) == KEEP_ALIVE
    cluster.gates[0].set()
    while (chunk := await next_chunk(call)) == KEEP_ALIVE:
        pass
    assert b'"text":"H"' in chunk
    assert await next_chunk(call) == KEEP_ALIVE
    cluster.gates[1].set()
    while (chunk := await next_chunk(call)) == KEEP_ALIVE:
        pass
    assert b'"text":"e"' in chunk
    await call.task
    assert cluster.idle


async def test_a_failure_after_the_first_comment_is_an_event(cluster, tight, make_app):
    tight(timeouts={"keepalive_s": 0.01}, max_attempts=1)
    cluster.gates[0] = asyncio.Event()
    cluster.troubles[0] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    call = Call(make_app(cluster), COMPLETIONS, {"prompt": "a", "stream": True})
    assert await next_chunk(call) == KEEP_ALIVE
    cluster.gates[0].set()
    while (chunk := await next_chunk(call)) == KEEP_ALIVE:
        pass
    error = json.loads(chunk.removeprefix(b"data: "))["error"]
    assert "it died" in error["message"]
    assert error["request_id"]
    await call.task


async def test_a_client_that_leaves_before_the_first_token(cluster, tight, make_app, wait_until):
    tight(timeouts={"keepalive_s": 0.01})
    cluster.gates[0] = asyncio.Event()
    call = Call(make_app(cluster), COMPLETIONS, {"prompt": "a", "stream": True})
    assert await next_chunk(call) == KEEP_ALIVE
    call.hang_up()
    await call.task
    await wait_until(lambda: cluster.idle)
    assert len(cluster.cancelled) == 1


# --- the end ---


async def test_a_graceful_end(cluster, make_app, make_client, wait_until):
    gate = Gate()
    app = make_app(cluster, gate=gate)
    cluster.gates[1] = asyncio.Event()
    async with make_client(app) as client:
        running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
        await wait_until(lambda: gate.inside == 1 and cluster.driver.count_running() == 1)
        closing = asyncio.create_task(gate.close(60))
        await wait_until(lambda: gate.closing)
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (GENERATE, {"text": "a"})):
            response = await client.post(path, json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "shutting_down"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert not closing.done()
        cluster.gates[1].set()
        assert (await running).status_code == 200
        assert await closing


async def test_who_stays_too_long_is_told(cluster, make_app, make_client, wait_until):
    gate = Gate()
    cluster.gates[1] = asyncio.Event()
    async with make_client(make_app(cluster, gate=gate)) as client:
        running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
        await wait_until(lambda: cluster.driver.count_running() == 1)
        assert not await gate.close(0)
        cluster.driver.close()
        response = await running
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"


# --- ids and stories ---


async def test_the_clients_id_reaches_the_workers(client, cluster):
    for _ in range(2):
        headers = {"x-request-id": "mine"}
        response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert response.headers["x-request-id"] == "mine"
    names = [start.attempt.request for start in cluster.started]
    assert all(name.startswith("mine-") for name in names)
    assert len(set(names)) == 2
    found = (await client.get("/admin/requests/mine")).json()
    assert [each["id"] for each in found["sequences"]] == sorted(names)


async def test_a_story(client, cluster):
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    response = await client.post(CHAT, json={"messages": MESSAGES, "n": 2, "max_tokens": 5})
    for name in (response.json()["id"], response.headers["x-request-id"]):
        first, second = (await client.get(f"/admin/requests/{name}")).json()["sequences"]
        assert sorted([first["attempts"], second["attempts"]]) == [1, 2]
        assert first["completion_tokens"] == 5
        for sequence in (first, second):
            assert [each["attempt"] for each in sequence["placements"]] == [
                *range(1, sequence["attempts"] + 1)
            ]
        retried = first if first["attempts"] == 2 else second
        assert [move["state"] for move in retried["story"]] == [
            *("new", "placing", "running", "placing", "running", "finished")
        ]
        assert any("it died" in move["why"] for move in retried["story"])
        ages = [move["ago_s"] for move in retried["story"]]
        assert ages == sorted(ages, reverse=True)
        assert ages[-1] >= 0


async def test_the_story_of_a_running_request(client, cluster, wait_until):
    cluster.gates[1] = asyncio.Event()
    headers = {"x-request-id": "slow"}
    running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers))
    await wait_until(lambda: cluster.driver.count_running() == 1)
    (sequence,) = (await client.get("/admin/requests/slow")).json()["sequences"]
    assert sequence["state"] == "running"
    cluster.gates[1].set()
    await running


async def test_stories_are_bounded(client, cluster, tight):
    tight(recent_requests=2)
    cluster.driver = type(cluster.driver)(cluster, cluster.config, cluster.metrics)
    names = []
    for _ in range(3):
        response = await client.post(COMPLETIONS, json={"prompt": "a"})
        names.append(response.headers["x-request-id"])
    statuses = [(await client.get(f"/admin/requests/{name}")).status_code for name in names]
    assert statuses == [404, 200, 200]


# --- the log ---


def entries(caplog):
    return [record.fields for record in caplog.records if record.name == "pd_cluster.access"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_line_a_request_without_its_text(client, cluster, caplog, stream):
    cluster.prefill_hit = 2
    with caplog.at_level(logging.INFO, "pd_cluster.access"):
        body = {"prompt": "secret", "max_tokens": 4, "stream": stream}
        response = await client.post(COMPLETIONS, json=body)
        await client.get("/health")
    (entry,) = entries(caplog)
    assert entry.pop("total_s") >= entry.pop("ttft_s") > 0
    assert entry.pop("id").startswith(entry["request_id"])
    assert entry == {
        "request_id": response.headers["x-request-id"],
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
        "stream": stream,
        "choices": 1,
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "finish_reasons": ["length"],
    }
    assert "secret" not in caplog.text


async def test_prompts_where_they_are_wanted(client, cluster, tight, caplog, make_app, make_client):
    tight(log_prompts=True)
    with caplog.at_level(logging.INFO, "pd_cluster.access"):
        async with make_client(make_app(cluster)) as client:
            await client.post(COMPLETIONS, json={"prompt": "secret"})
            await client.post(CHAT, json={"messages": MESSAGES})
            await client.post(GENERATE, json={"text": "other"})
    assert [entry["prompt"] for entry in entries(caplog)] == [["secret"], MESSAGES, ["other"]]


async def test_errors_and_hang_ups(client, call, cluster, caplog, wait_until):
    cluster.gates[1] = asyncio.Event()
    with caplog.at_level(logging.INFO, "pd_cluster.access"):
        await client.post(COMPLETIONS, json={"prompt": ""})
        left = call(COMPLETIONS, {"prompt": "a"})
        await wait_until(lambda: cluster.driver.count_running() == 1)
        left.hang_up()
        await left.task
    bad, gone = entries(caplog)
    assert (bad["status"], bad["error"]) == (400, "empty_prompt")
    assert gone["status"] == 499
    assert gone["prompt_tokens"] in (0, 1)


# --- names and limits ---


async def test_other_names_of_the_model(cluster, make_app, make_client):
    async with make_client(make_app(cluster, aliases=("small", "org/small"))) as client:
        names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        assert names == ["tiny", "small", "org/small"]
        assert (await client.get("/v1/models/org/small")).status_code == 200
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "model": "small"})
        assert answer.json()["model"] == "small"
        response = await client.post(COMPLETIONS, json={"prompt": "a", "model": "large"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


async def test_how_many_messages(cluster, tight, make_app, make_client):
    tight(max_messages=2)
    async with make_client(make_app(cluster)) as client:
        assert (await client.post(CHAT, json={"messages": MESSAGES * 2})).status_code == 200
        response = await client.post(CHAT, json={"messages": MESSAGES * 3})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "max_messages" in response.json()["error"]["message"]


async def test_how_many_parts(client):
    parts = [{"type": "text", "text": ""}] * 1025
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert "1024" in response.json()["error"]["message"]


async def test_how_large_a_body(cluster, tight, make_app, make_client):
    tight(max_body_bytes=1024)
    async with make_client(make_app(cluster)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a" * 1024})
    assert response.status_code == 413
    assert "1024" in response.json()["error"]["message"]


async def test_how_slow_a_body(cluster, tight, make_app):
    tight(timeouts={"request_s": 0.2})
    async with serve(make_app(cluster)) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"prompt":')
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer  # or one that trickles would keep it for ever
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["code"] == "body_too_slow"
    assert "10 bytes" in error["message"]
    assert "timeouts.request_s (0.2 s)" in error["message"]


async def test_how_deep_a_body(client):
    deep = "[" * 500 + "]" * 500
    response = await client.post(COMPLETIONS, content=f'{{"prompt": "a", "metadata": {deep}}}')
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


# --- the document ---


async def test_what_the_openapi_document_tells_is_there(client):
    document = (await client.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method in operations:
            response = await client.request(method, path.replace("{", "").replace("}", ""))
            assert "no route" not in response.text
            assert response.status_code != 405
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    assert properties["response_format"]["enum"] == [None, {"type": "text"}]
    assert properties["temperature"]["anyOf"][0]["maximum"] == 2
    assert "logit_bias" in document["components"]["schemas"]["NativeSampling"]["properties"]
