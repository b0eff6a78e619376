"""Every error is an answer in one shape that names the field; nothing of it reaches the cluster."""

from __future__ import annotations

import asyncio

import pytest

from pd_cluster.config import validate_config
from pd_cluster.types import AttemptId, Output, Rejection

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]
VALID = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hi"},
    GENERATE: {"text": "Hi"},
}


def check(response, status: int, param: str | None = None, *words: str) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["param"] == param
    for word in words or ([param] if param else []):
        assert word in error["message"]
    return error


SHARED = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"258": 5}}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {"01": 5}}, "logit_bias.01.[key]"),
    ({"logit_bias": {"-1": 5}}, "logit_bias.-1.[key]"),
    ({"logit_bias": {"a": 5}}, "logit_bias.a.[key]"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
]
INTERNAL = ["attempt", "worker", "reservation", "prefill", "decode", "bootstrap_room", "nonsense"]


@pytest.mark.parametrize(("fields", "param"), SHARED)
@pytest.mark.parametrize("path", VALID)
async def test_sampling_parameters(client, cluster, path, fields, param):
    if path == GENERATE:
        response = await client.post(path, json={"text": "Hi", "sampling_params": fields})
        # The vocabulary is checked by those who know nothing of the body's structure.
        if fields.get(param) not in ([258], {"258": 5}):
            param = f"sampling_params.{param}"
    else:
        response = await client.post(path, json={**VALID[path], **fields})
    check(response, 400, param)
    assert cluster.placed == []


@pytest.mark.parametrize("field", INTERNAL)
@pytest.mark.parametrize("path", VALID)
async def test_internal_fields_case_30(client, cluster, path, field):
    error = check(await client.post(path, json={**VALID[path], field: 1}), 400, field)
    assert error["code"] == "unknown_parameter"
    assert cluster.placed == []


async def test_internal_fields_within_sampling_params_case_30(client):
    body = {"text": "Hi", "sampling_params": {"worker": "decode-0"}}
    check(await client.post(GENERATE, json=body), 400, "sampling_params.worker")


OPENAI = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"worker": 1}}, "stream_options.worker"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"timeout": 0}, "timeout"),
]


@pytest.mark.parametrize(("fields", "param"), OPENAI)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_openai_parameters(client, path, fields, param):
    check(await client.post(path, json={**VALID[path], **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "", "attempt": 1}]}, "messages.0.attempt"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_chat_parameters(client, fields, param):
    check(await client.post(CHAT, json={**VALID[CHAT], **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [[]]}, "no tokens"),
        ({"prompt": [258]}, "token id 258 is not in the vocabulary (0 to 257)"),
        ({"prompt": [[1], [-1]]}, "token id -1"),
        ({"prompt": [1, "a"]}, "element 0"),
        ({"prompt": [[1, True]]}, "element 0"),
        ({"prompt": [1.5]}, "element 0"),
        ({"prompt": {}}, "an object"),
        ({"prompt": None}, "null"),
        ({"prompt": ["a"] * 257}, "at most 256"),
    ],
)
async def test_prompts(client, fields, words):
    check(await client.post(COMPLETIONS, json=fields), 400, "prompt", words)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [999]}, "input_ids"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_seed"),
        ({"text": "a", "stream": "x"}, "stream"),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 6, "max_new_tokens": 5}},
            "min_new_tokens",
        ),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
async def test_generate_parameters(client, cluster, fields, param):
    check(await client.post(GENERATE, json=fields), 400, param)
    assert cluster.placed == []


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"temperature": NaN}', b'{"a": "\xff"}', b"[" * 100_000],
)
async def test_malformed_json(client, path, content):
    error = check(await client.post(path, content=content), 400)
    assert error["code"] == "invalid_json"


async def test_a_number_that_is_infinite(client):
    content = b'{"prompt": "Hi", "temperature": 1e999}'
    check(await client.post(COMPLETIONS, content=content), 400, "temperature", "finite")


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"text"'])
async def test_a_body_that_is_no_object(client, path, content):
    check(await client.post(path, content=content), 400, None, "JSON object")


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(client, announced):
    big = b" " * (16 * 1024 * 1024 + 1)

    async def chunks():
        for start in range(0, len(big), 1 << 20):
            yield big[start : start + (1 << 20)]

    content = big if announced else chunks()
    error = check(await client.post(CHAT, content=content), 413, None, "16777216")
    assert error["code"] == "payload_too_large"


async def test_routes(client):
    check(await client.get("/v1/nothing"), 404, None, "/v1/nothing")
    check(await client.get("/v1/models/other"), 404, "model", "'other'")
    response = await client.get(CHAT)
    check(response, 405, None, "GET", CHAT)
    assert response.headers["allow"] == "OPTIONS, POST"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_model(client, path):
    response = await client.post(path, json={**VALID[path], "model": "gpt"})
    error = check(response, 404, "model", "'gpt'", "'tiny'")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_context_length_case_25(client, cluster, path):
    key = "prompt" if path == COMPLETIONS else "text"
    for extra in ({}, {"stream": True}):
        response = await client.post(path, json={key: "x" * 256, **extra})
        error = check(response, 400, key, "(256 tokens)", "context length of 256")
        assert error["code"] == "context_length_exceeded"
    assert cluster.placed == []


async def test_the_longest_prompt_gets_one_token(client, cluster):
    response = await client.post(COMPLETIONS, json={"prompt": "x" * 255})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 1


async def test_chat_prompt_too_long(client, cluster):
    message = {"role": "user", "content": "x" * 300}
    response = await client.post(CHAT, json={"messages": [message]})
    check(response, 400, "messages", "context length of 256")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 1000}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 1000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 255}, "max_tokens"),
        (GENERATE, {"text": "Hi", "sampling_params": {"max_new_tokens": 255}}, "max_new_tokens"),
    ],
)
async def test_more_tokens_asked_than_fit(client, cluster, path, body, param):
    check(await client.post(path, json=body), 400, param, "context length of 256")
    assert cluster.placed == []


async def test_defaults_are_clipped(client, cluster):
    cluster.reply = [5]
    answer = await client.post(CHAT, json={"messages": MESSAGES})
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == 256
    answer = await client.post(COMPLETIONS, json={"prompt": "x" * 250})
    assert answer.json()["usage"]["completion_tokens"] == 6
    answer = await client.post(COMPLETIONS, json={"prompt": "x"})
    assert answer.json()["usage"]["completion_tokens"] == 16
    answer = await client.post(GENERATE, json={"text": "x"})
    assert answer.json()["meta_info"]["completion_tokens"] == 128


async def test_what_can_never_fit_case_14(cluster, make_app, make_client):
    async with make_client(make_app(cluster, pool_capacity=20)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 20})
        error = check(response, 400, "prompt", "(20 tokens)", "KV pool of 20 tokens")
        assert error["code"] == "kv_pool_exceeded"
        body = {"prompt": "x" * 10, "max_tokens": 11}
        response = await client.post(COMPLETIONS, json=body)
        check(response, 400, "max_tokens", "max_tokens (11)", "KV pool of 20 tokens")
        assert cluster.placed == []
        body = {"prompt": "x" * 10, "max_tokens": 10}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    ("status", "retry_after_s", "header"),
    [(429, 2.5, "3"), (503, None, "1"), (504, None, None), (400, None, None)],
)
async def test_rejections(client, cluster, path, stream, status, retry_after_s, header):
    cluster.place_answers = [
        Rejection(
            attempt=AttemptId("", 1),
            status=status,
            reason="queue_full",
            message="1024 requests are waiting",
            retry_after_s=retry_after_s,
        )
    ]
    response = await client.post(path, json={**VALID[path], "stream": stream})
    error = check(response, status, None, "1024 requests are waiting")
    assert error["code"] == "queue_full"
    assert response.headers.get("retry-after") == header
    assert cluster.idle


@pytest.mark.parametrize("path", VALID)
async def test_a_stream_that_fails_in_the_middle_case_27(client, cluster, path, events):
    cluster.driver.config = validate_config({"max_attempts": 1})
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    response = await client.post(path, json={**VALID[path], "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks
    assert "[DONE]" not in response.text
    assert last["error"]["code"] == "attempts_exhausted"
    assert "it died" in last["error"]["message"]
    assert '"finish_reason":"' not in response.text
    assert '"finish_reason":{' not in response.text


async def test_one_prompt_of_several_fails(client, cluster):
    cluster.driver.config = validate_config({"max_attempts": 1})
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    response = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
    check(response, 500, None, "it died")
    assert cluster.idle


async def test_our_bug(client, cluster, caplog):
    cluster.driver = None
    error = check(await client.post(CHAT, json=VALID[CHAT]), 500)
    assert error["code"] == "internal_error"
    assert "NoneType" not in error["message"]


async def test_request_id(client):
    given = {"x-request-id": "my-id-1"}
    response = await client.post(CHAT, json=VALID[CHAT], headers=given)
    assert response.headers["x-request-id"] == "my-id-1"
    response = await client.post(CHAT, json=VALID[CHAT], headers={"x-request-id": "a b"})
    assert response.headers["x-request-id"] != "a b"
    response = await client.post(CHAT, json={}, headers=given)
    assert response.headers["x-request-id"] == "my-id-1"
    first, second = await asyncio.gather(client.get("/health"), client.get("/health"))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_fields_that_ask_for_nothing_are_taken(client, cluster):
    shared = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "user": "me",
        "stop": None,
        "seed": None,
        "temperature": None,
        "top_p": 1,
        "top_k": -1,
        "stream": False,
        "stream_options": None,
    }
    chat = {
        **shared,
        "logprobs": False,
        "top_logprobs": None,
        "tools": None,
        "response_format": {"type": "text"},
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}]},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
            {"role": "user", "content": "Hi", "name": "me"},
        ],
    }
    assert (await client.post(CHAT, json=chat)).status_code == 200
    completion = {**shared, "prompt": "Hi", "logprobs": None, "echo": False, "best_of": 1}
    assert (await client.post(COMPLETIONS, json=completion)).status_code == 200
    native = {"text": "Hi", "sampling_params": None, "return_logprob": False, "rid": None}
    assert (await client.post(GENERATE, json=native)).status_code == 200
    assert {start.params.top_k for start in cluster.started} == {0}
