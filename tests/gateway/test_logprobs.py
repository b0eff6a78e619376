"""Logprobs in each API's shape; with this tokenizer every token is one byte."""

from __future__ import annotations

import pytest

from pd_cluster.gateway.logprobs import CompletionLogprobs, chat_logprobs
from pd_cluster.model.token_bytes import token_bytes
from pd_cluster.types import TokenLogprobs

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def post(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_chat(client, cluster, tokenizer):
    cluster.reply = tokenizer.encode("aö")
    answer = await post(
        client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xB6]]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert {entry["logprob"] for entry in content} == {-0.5}
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "!", "logprob": -1.0, "bytes": [33]},
    ]
    assert len(content) == answer["usage"]["completion_tokens"]


async def test_chat_without_top_logprobs(client):
    answer = await post(client, CHAT, messages=MESSAGES, logprobs=True, max_tokens=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]
    answer = await post(client, CHAT, messages=MESSAGES, max_tokens=2)
    assert answer["choices"][0]["logprobs"] is None


async def test_chat_streams_the_logprobs_of_every_token(client, cluster, tokenizer, events):
    """Of those too whose text is held back."""
    cluster.reply = tokenizer.encode("a🌍b")
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 6, "stream": True}
    response = await client.post(CHAT, json=body)
    chunks = [each["choices"][0] for each in events(response.text)[:-1]]
    entries = [
        entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ]
    assert bytes(entry["bytes"][0] for entry in entries).decode() == "a🌍b"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "a🌍b"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(client, cluster, tokenizer, events, stream):
    cluster.reply = tokenizer.encode("aöb")
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 4, "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    if stream:
        found = [each["choices"][0]["logprobs"] for each in events(response.text)[:-1]]
    else:
        found = [response.json()["choices"][0]["logprobs"]]
    merged = {key: sum((each[key] for each in found), []) for key in found[0]}
    assert merged["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb6", "b"]
    assert merged["token_logprobs"] == [-0.5] * 4
    assert merged["text_offset"] == [0, 1, 1, 2]
    assert merged["top_logprobs"][0] == {"a": -0.5}


async def test_several_choices_have_offsets_of_their_own(client, cluster, tokenizer):
    cluster.reply = tokenizer.encode("abc")
    answer = await post(client, COMPLETIONS, prompt="x", n=2, logprobs=0, max_tokens=3)
    offsets = [choice["logprobs"]["text_offset"] for choice in answer["choices"]]
    assert offsets == [[0, 1, 2], [0, 1, 2]]
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


async def test_native(client, cluster, tokenizer):
    cluster.reply = tokenizer.encode("ab")
    params = {"max_new_tokens": 2}
    answer = await post(client, GENERATE, text="x", sampling_params=params, return_logprob=True)
    a, b = tokenizer.encode("ab")
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, a, None], [-0.5, b, None]]
    assert "output_top_logprobs" not in meta
    answer = await post(
        client,
        GENERATE,
        text="x",
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, a, "a"], [-0.5, b, "b"]]
    assert meta["output_top_logprobs"][1] == [[-0.5, b, "b"], [-1.0, 0, "!"]]


def test_infinity_is_no_json(tokenizer):
    entry = TokenLogprobs(0, float("-inf"), ((1, float("-inf")),))
    content = chat_logprobs(tokenizer, [entry])["content"]
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -9999.0


def test_of_tokens_that_read_alike_the_likeliest_stays(tokenizer):
    """Ids beyond the vocabulary, which padded models have, read as nothing."""
    entry = TokenLogprobs(5, -3.0, ((1000, -1.0), (1001, -2.0)))
    rendered = CompletionLogprobs(tokenizer).render([entry])
    assert rendered["top_logprobs"] == [{"": -1.0, tokenizer.token_bytes(5).decode(): -3.0}]


@pytest.mark.parametrize(
    ("spelling", "byte_level", "wanted"),
    [
        ("Ġthe", True, b" the"),
        ("Ċ", True, b"\n"),
        ("Ã", True, b"\xc3"),
        ("<|im_end|>", True, b"<|im_end|>"),
        ("<｜end｜>", True, "<｜end｜>".encode()),
        ("▁the", False, b" the"),
        ("<0xE2>", False, b"\xe2"),
        ("Ã", False, "Ã".encode()),
        ("", False, b""),
    ],
)
def test_token_bytes(spelling, byte_level, wanted):
    assert token_bytes(spelling, byte_level=byte_level) == wanted


def test_every_byte_has_its_character(tokenizer):
    assert {tokenizer.token_bytes(index) for index in range(256)} == {
        bytes([byte]) for byte in range(256)
    }
