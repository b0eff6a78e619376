from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
HELLO = "Hello, wörld 🌍!"


async def generate(client, **body):
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_meta_info(client, cluster):
    cluster.prefill_hit = 1
    answer = await generate(client, text="abc", rid="mine", sampling_params={"max_new_tokens": 4})
    assert answer["text"] == "Hell"
    assert len(answer["output_ids"]) == 4
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 1,
    }


async def test_sampling_params(client, cluster):
    params = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "max_new_tokens": 9,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "sampling_seed": 11,
    }
    await generate(client, input_ids=[1, 2], sampling_params=params, extra_key="tenant")
    (start,) = cluster.started
    sampling = start.params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.max_tokens, sampling.seed, sampling.ignore_eos) == (9, 11, True)
    assert sampling.stop_token_ids == (4,)
    assert start.namespace == "tenant"


async def test_finish_reasons(client, tokenizer):
    answer = await generate(client, text="a")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}
    answer = await generate(client, text="a", sampling_params={"stop": ["zzz", "lo"]})
    assert answer["text"] == "Hel"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lo"}
    (comma,) = tokenizer.encode(",")
    answer = await generate(client, text="a", sampling_params={"stop_token_ids": [comma]})
    assert answer["text"] == "Hello"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": comma}


@pytest.mark.parametrize("body", [{"text": ["a", "bc"]}, {"input_ids": [[1], [2, 3]]}])
async def test_a_list_is_answered_by_a_list(client, body):
    answers = await generate(client, **body, rid=["x", "y"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert len(await generate(client, text=["a"])) == 1


async def test_stream_has_the_text_so_far(client, events):
    response = await client.post("/generate", json={"text": "a", "stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))
    assert texts[-1] == HELLO
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert "index" not in chunks[0]


async def test_stream_of_several(client, events):
    body = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    *chunks, _ = events((await client.post("/generate", json=body)).text)
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert last == {0: "Hel", 1: "Hel"}
