"""A client that hangs up stops the work, at any moment of it; and nothing is left."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from pd_cluster.types import Output, Sources

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": ["one", "two"]},
    "/generate": {"text": "Hi"},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_while_waiting_for_a_place_case_2(call, cluster, wait_until, path, stream):
    cluster.place_gate = asyncio.Event()
    running = call(path, {**BODIES[path], "stream": stream})
    count = 2 if path == "/v1/completions" else 1
    await wait_until(lambda: len(cluster.placed) == count)
    running.hang_up()
    await running.task
    assert cluster.idle
    assert {each.outcome for each in cluster.ended} == {"aborted"}
    assert len(cluster.ended) == count
    assert cluster.started == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("position", [0, 1])
async def test_while_tokens_are_made_cases_1_and_5(
    call, cluster, wait_until, path, stream, position
):
    cluster.gates[position] = asyncio.Event()
    running = call(path, {**BODIES[path], "stream": stream})
    count = 2 if path == "/v1/completions" else 1
    await wait_until(lambda: len(cluster.started) == count)
    if stream and position == 1:
        await running.next_events(1)
    running.hang_up()
    await running.task
    assert len(cluster.cancelled) == count
    assert cluster.idle
    assert {each.outcome for each in cluster.ended} == {"aborted"}


async def test_after_the_answer_nothing_is_cancelled(call, cluster):
    running = call(CHAT, BODIES[CHAT])
    start, body = await running.next(), await running.next()
    assert (start["status"], body["type"]) == (200, "http.response.body")
    running.hang_up()
    await running.task
    assert cluster.cancelled == []


async def test_a_stop_string_ends_the_work(client, cluster):
    body = {**BODIES[CHAT], "stop": "wö"}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("Hello, wö".encode())
    assert len(cluster.cancelled) == 1
    assert cluster.idle


@pytest.mark.parametrize("stream", [True, False])
async def test_over_a_real_connection(url, cluster, wait_until, stream):
    cluster.gates[1] = asyncio.Event()
    host, port = url.removeprefix("http://").split(":")
    client = httpx.AsyncClient(base_url=url)
    body = client.build_request("POST", CHAT, json={**BODIES[CHAT], "stream": stream})
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body.content)}\r\n\r\n"
        connection.sendall(head.encode() + body.content)
        await wait_until(lambda: cluster.driver.count_running() == 1)
    await wait_until(lambda: cluster.idle)
    assert len(cluster.cancelled) == 1
    await client.aclose()


async def test_tokens_after_a_stop_string_do_not_count(call, cluster, wait_until, tokenizer):
    """The worker was ahead of the text when the stop string was found."""
    cluster.manual = True
    running = call(CHAT, {**BODIES[CHAT], "stop": "lo"})
    await wait_until(lambda: len(cluster.started) == 1)
    attempt = cluster.started[0].attempt
    sources = Sources(computed=cluster.started[0].prompt_len)
    for token in tokenizer.encode("Hello, world"):
        cluster.deliver(Output(attempt=attempt, tokens=(token,), sources=sources))
    await wait_until(lambda: cluster.cancelled == [attempt])
    cluster.deliver(Output(attempt=attempt, outcome="aborted"))
    await running.next()
    answer = json.loads((await running.next())["body"])
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["usage"]["completion_tokens"] == 5
    await running.task
    assert cluster.idle
    text = cluster.metrics.render().decode()
    assert 'pd_request_total{finish_reason="stop",model="tiny"} 1.0' in text
