from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from pd_cluster.types import Output, Sources, WorkerId, unpack_ints

pytestmark = pytest.mark.anyio
HELLO = "Hello, wörld 🌍!"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def test_whole_answer(client, cluster):
    cluster.prefill_hit = 3
    response = await client.post("/v1/chat/completions", json=ASK)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": HELLO, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = cluster.started[0].prompt_len
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(HELLO.encode()) + 1,
        "total_tokens": prompt_tokens + len(HELLO.encode()) + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert cluster.idle


async def test_stream(client, events, texts, cluster):
    response = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(chunks) == HELLO
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "�" not in response.text


async def test_usage_chunk_case_28(client, events):
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events((await client.post("/v1/chat/completions", json=ask)).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(HELLO.encode()) + 1
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_first_token_is_sent_at_once_case_29(call, cluster):
    cluster.gates[1] = asyncio.Event()
    stream = call("/v1/chat/completions", {**ASK, "stream": True})
    role, first = await stream.next_events(2)
    assert first["choices"][0]["delta"] == {"content": "H"}
    cluster.gates[1].set()
    await stream.task
    assert cluster.idle


async def test_completions(client: httpx.AsyncClient, cluster, tokenizer):
    prompts = ["one", "two two"]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 5}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "Hello"),
        (1, "Hello"),
    ]
    assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 10
    assert {each.prompt_len for each in cluster.started} == {3, 7}


async def test_generate_as_the_walk_through_calls_it(client: httpx.AsyncClient, cluster):
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post("/generate", content=b'{"text": "abc"}', headers=form)
    assert response.status_code == 200
    body = response.json()
    assert body["text"] == HELLO
    assert body["meta_info"]["prompt_tokens"] == 3
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}


@pytest.mark.parametrize("length", [100, 5000])
async def test_long_texts_are_tokenised_in_a_thread(cluster, make_app, make_client, length):
    cluster.reply = [5]
    app = make_app(cluster, context_length=20_000, pool_capacity=20_000)
    async with make_client(app) as client:
        completion = {"prompt": "x" * length, "max_tokens": 1}
        answer = (await client.post("/v1/completions", json=completion)).json()
        assert answer["usage"]["prompt_tokens"] == length
        chat = {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 1}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["usage"]["prompt_tokens"] > length


async def test_the_prompt_is_the_templates(client, cluster, tokenizer):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}]},
        {"role": "assistant", "content": "x", "refusal": None},
        {"role": "user", "content": "Hi"},
    ]
    await client.post("/v1/chat/completions", json={"messages": messages})
    prompt = unpack_ints(cluster.started[0].tokens).tolist()
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe <|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_worker_lost_after_the_end_of_sequence(call, cluster, wait_until, ignore_eos):
    """The client has all of it, unless it wants to read on."""
    cluster.manual = True
    running = call("/v1/chat/completions", {**ASK, "ignore_eos": ignore_eos})
    await wait_until(lambda: len(cluster.started) == 1)
    attempt = cluster.started[0].attempt
    sources = Sources(computed=cluster.started[0].prompt_len)
    cluster.deliver(Output(attempt=attempt, tokens=(39, 257), sources=sources))
    cluster.driver.worker_lost(WorkerId("decode-0", "a"))
    if ignore_eos:
        await wait_until(lambda: len(cluster.started) == 2)
        running.hang_up()
    else:
        await running.next()
        answer = json.loads((await running.next())["body"])
        assert answer["choices"][0]["message"]["content"] == "H"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(cluster.placed) == 1
    await running.task
