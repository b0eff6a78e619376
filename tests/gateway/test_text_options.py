"""How a request wants its text: stop strings kept or not, special tokens, echo, minimum length."""

from __future__ import annotations

import pytest

from pd_cluster.gateway.text import TextOptions, TextStream

pytestmark = pytest.mark.anyio
EOS = 257
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = "Hello, wörld 🌍!"


async def text_of(client, **fields):
    response = await client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 50, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def test_the_stop_string_may_be_kept(client):
    assert await text_of(client, stop="lo") == "Hel"
    assert await text_of(client, stop="lo", include_stop_str_in_output=True) == "Hello"
    params = {"stop": ["lo"], "no_stop_trim": True}
    answer = await client.post(GENERATE, json={"text": "a", "sampling_params": params})
    assert answer.json()["text"] == "Hello"


async def test_special_tokens_may_be_kept(client, cluster, tokenizer):
    cluster.reply = [256, *tokenizer.encode("a"), EOS]
    assert await text_of(client) == "a"
    assert await text_of(client, skip_special_tokens=False) == "<|im_start|>a"
    kept = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert await text_of(client, **kept) == "<|im_start|>a<|im_end|>"


async def test_echo(client, events):
    assert await text_of(client, echo=True) == f"ab{HELLO}"
    ids = {"prompt": [[65], [66]], "n": 2, "max_tokens": 1, "echo": True}
    answer = (await client.post(COMPLETIONS, json=ids)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["bH", "bH", "cH", "cH"]
    body = {"prompt": "ab", "echo": True, "stream": True, "max_tokens": 3}
    chunks = events((await client.post(COMPLETIONS, json=body)).text)[:-1]
    assert [each["choices"][0]["text"] for each in chunks] == ["abH", "e", "l", ""]


async def test_stop_strings_count_from_min_tokens_on_case_26(client):
    assert await text_of(client, stop="l") == "He"
    # The fourth token is the second l, the first that may end it.
    assert await text_of(client, stop="l", min_tokens=4) == "Hel"
    assert await text_of(client, stop="l", min_tokens=5) == "Hello, wör"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_min_tokens_holds_for_tokens_that_come_together(tokenizer, size):
    options = TextOptions(stops=("b",), min_tokens=3)
    stream = TextStream(tokenizer, options, {EOS})
    ids = tokenizer.encode("abcabc")
    text = "".join(stream.feed(ids[at : at + size]) for at in range(0, len(ids), size))
    assert text + stream.flush() == "abca"
    assert stream.matched == "b"


async def test_special_tokens_of_the_tokenizer_may_be_left_out(client, tokenizer, monkeypatch):
    asked = []
    encode = tokenizer.encode

    def note(text, *, add_special_tokens=True):
        asked.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", note)
    await text_of(client)
    await text_of(client, add_special_tokens=False)
    assert asked == [True, False]
