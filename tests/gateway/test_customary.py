"""Routes and methods that clients, load balancers and other servers' tools take for granted."""

from __future__ import annotations

import asyncio

import pytest

from pd_cluster import __version__
from pd_cluster.config import validate_config
from pd_cluster.gateway import customary
from pd_cluster.gateway.gate import Gate
from pd_cluster.types import Rejection
from tests.gateway.conftest import CONTEXT, asgi_client, serve

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# --- methods ---


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/server_info", "/version"])
async def test_head_is_get_without_the_body(client, path):
    whole, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    if path not in ("/metrics", "/server_info"):  # whose length changes
        assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers["x-request-id"]


async def test_head_over_a_real_connection(app):
    """The server sends no byte after the head: the connection goes on to be used."""
    async with serve(app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        for wanted in (b"", b'{"status":"ok"}'):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(wanted)) == wanted
        writer.close()
        await writer.wait_closed()


async def test_head_of_what_is_not_there(client):
    assert (await client.head("/nothing")).status_code == 404
    response = await client.head(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "OPTIONS, POST")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD, OPTIONS"),
        (CHAT, "OPTIONS, POST"),
        ("/flush_cache", "GET, HEAD, OPTIONS, POST"),
        ("/admin/scale", "GET, HEAD, OPTIONS, POST"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
    ],
)
async def test_options_and_405_name_what_is_allowed(client, path, allowed):
    response = await client.options(path)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["allow"] == allowed
    response = await client.delete(path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert f"DELETE is not allowed for {path}: {allowed}" in response.json()["error"]["message"]


async def test_options_of_what_is_not_there(client):
    assert (await client.options("/nothing")).status_code == 404


# --- probes and facts ---


async def test_ping_and_version(client):
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 200
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_model_info(client):
    for path in ("/model_info", "/get_model_info"):
        info = (await client.get(path)).json()
        assert (info["served_model_name"], info["is_generation"]) == ("tiny", True)
        assert (info["max_model_len"], info["model_path"]) == (CONTEXT, "smollm2")


async def test_health_generate_asks_the_whole_cluster(client, cluster):
    response = await client.get("/health_generate")
    assert response.status_code == 200
    (start,) = cluster.started
    assert (start.prompt_len, start.params.max_tokens) == (1, 1)
    assert cluster.idle
    cluster.place_answers = [
        Rejection(attempt=start.attempt, status=503, reason="no_worker", message="none is ready")
    ]
    response = await client.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")


async def test_health_generate_does_not_wait_for_ever(client, cluster, monkeypatch):
    monkeypatch.setattr(customary, "PROBE_S", 0.01)
    cluster.gates[0] = asyncio.Event()
    assert (await client.get("/health_generate")).status_code == 504
    assert cluster.idle


async def test_health_generate_is_refused_while_the_server_ends(cluster, make_app):
    gate = Gate()
    gate.closing = True
    async with asgi_client(make_app(cluster, gate=gate)) as client:
        response = await client.get("/health_generate")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_only_ping_is_open_where_keys_are_needed(cluster, make_app):
    cluster.config = validate_config({"api_keys": ["one"]})
    async with asgi_client(make_app(cluster), "10.0.0.9") as client:
        for path in ("/version", "/model_info", "/health_generate"):
            assert (await client.get(path)).status_code == 401
        for path in ("/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).status_code == 401
        assert (await client.get("/ping")).status_code == 200


# --- tokens ---


async def test_tokenize_a_text_and_back(client, tokenizer):
    text = "ö<|im_end|>"
    body = {"prompt": text, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (3, CONTEXT)
    assert answer["token_strs"] == ["\ufffd", "\ufffd", "<|im_end|>"]
    back = {"tokens": answer["tokens"]}
    assert (await client.post("/detokenize", json=back)).json() == {"prompt": text}
    back["skip_special_tokens"] = True
    assert (await client.post("/detokenize", json=back)).json() == {"prompt": "ö"}


async def test_tokenize_a_conversation_as_chat_does(client, cluster):
    messages = [{"role": "user", "content": "Hi"}]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    assert "token_strs" not in answer
    chat = await client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert chat.json()["usage"]["prompt_tokens"] == answer["count"]
    body = {"messages": messages, "add_generation_prompt": False}
    shorter = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
async def test_what_is_no_text(client, path, body, param):
    response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
