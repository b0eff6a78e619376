"""Logprobs of prompts in each API's shape; the fake cluster scores token i at -i / 4."""

from __future__ import annotations

import pytest

from pd_cluster.gateway import prepare

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(autouse=True)
def _reply(cluster, tokenizer):
    cluster.reply = tokenizer.encode("xyz")


async def post(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_gives_the_prompts_tokens_before_the_answers(client, cluster, tokenizer):
    answer = await post(client, COMPLETIONS, prompt="aöb", echo=True, logprobs=2, max_tokens=2)
    (choice,) = answer["choices"]
    assert choice["text"] == "aöbxy"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb6", "b", "x", "y"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.5, -0.75, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    likely = [tokenizer.token_bytes(65 + top).decode() for top in range(2)]
    best = {likely[0]: -0.125, likely[1]: -0.25}
    # A token that is not among the likeliest stands beside them.
    assert logprobs["top_logprobs"][:2] == [None, {**best, "bytes:\\xc3": -0.25}]
    assert logprobs["top_logprobs"][2] == {**best, "bytes:\\xb6": -0.5}
    assert "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 2


async def test_max_tokens_0_gives_the_prompt_alone(client, cluster):
    """As lm-evaluation-harness asks; batches too, by text or by ids."""
    for prompts in (["abc", "de"], [[64, 65, 66], [67, 68]]):
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = await post(client, COMPLETIONS, **body)
        first, second = answer["choices"]
        assert first["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]
        assert second["logprobs"]["token_logprobs"] == [None, -0.25]
        assert [len(each["text"]) for each in (first, second)] == [3, 2]
        assert first["finish_reason"] == second["finish_reason"] == "length"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)
    assert {start.params.max_tokens for start in cluster.started} == {1}
    answer = await post(client, COMPLETIONS, prompt="abc", echo=True, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("abc", None)
    assert cluster.started[-1].params.prompt_logprobs == -1
    assert cluster.idle


async def test_max_tokens_0_without_the_prompt_asks_for_nothing(client, cluster):
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await client.post(path, json={**body, "max_tokens": 0})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
    assert not cluster.placed


@pytest.mark.parametrize("first", [1, 2])
async def test_one_of_several_sequences_scores_for_all(client, cluster, tokenizer, first):
    """Whichever gets its tokens first."""
    cluster.reply = tokenizer.encode("x")
    body = {"prompt": ["ab", "cd"], "n": first, "echo": True, "logprobs": 0, "max_tokens": 1}
    answer = await post(client, COMPLETIONS, **body)
    assert len(answer["choices"]) == 2 * first
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]
    scored = [start for start in cluster.started if start.params.prompt_logprobs >= 0]
    assert [start.sequence for start in scored] == [0, 0]


async def test_streams_tell_the_prompt_first(client, events):
    body = {
        "prompt": "ab",
        "n": 2,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 2,
        "stream": True,
        "seed": 1,
    }
    response = await client.post(COMPLETIONS, json=body)
    chunks = [each["choices"][0] for each in events(response.text)[:-1]]
    for index in (0, 1):
        mine = [chunk["logprobs"] for chunk in chunks if chunk["index"] == index]
        assert mine[0]["token_logprobs"] == [None, -0.25, -0.5]
        assert [each["tokens"] for each in mine] == [["a", "b", "x"], ["y"], []]
        assert [each["text_offset"] for each in mine] == [[0, 1, 2], [3], []]


async def test_prompt_logprobs_as_vllm_has_them(client, tokenizer):
    first = tokenizer.encode("a")[0]
    shown = {"logprob": -0.25, "rank": 2, "decoded_token": "a"}
    best = {"logprob": -0.125, "rank": 1, "decoded_token": tokenizer.token_bytes(65).decode()}
    body = {"prompt": "aa", "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = (await post(client, COMPLETIONS, **body))["choices"]
    assert choice["text"] == "x"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [None, {str(first): shown, "65": best}]
    messages = [{"role": "user", "content": "a"}]
    answer = await post(client, CHAT, messages=messages, prompt_logprobs=0, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])
    response = await client.post(COMPLETIONS, json={**body, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_native_from_a_token_on(client, tokenizer):
    a, b, c = tokenizer.encode("abc")
    body = {
        "text": "abc",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 0},
    }
    answer = await post(client, GENERATE, **body, logprob_start_len=0)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, a, "a"], [-0.25, b, "b"], [-0.5, c, "c"]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][1][0][:2] == [-0.125, 65]
    assert meta["output_token_logprobs"] == []
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    for start, wanted in ((1, [b, c]), (2, [c]), (9, [])):
        meta = (await post(client, GENERATE, **body, logprob_start_len=start))["meta_info"]
        assert [token for _, token, _ in meta["input_token_logprobs"]] == wanted
    meta = (await post(client, GENERATE, **body, logprob_start_len=-1))["meta_info"]
    assert "input_token_logprobs" not in meta
    response = await client.post(GENERATE, json={"text": "a", "logprob_start_len": 0})
    assert response.json()["error"]["param"] == "logprob_start_len"


async def test_placement_is_told_of_no_prefix(client, cluster):
    """Nothing will be taken from a cache: no worker is better than another for that."""
    text = "long enough for a block of hashes " * 4
    await post(client, COMPLETIONS, prompt=text, max_tokens=1)
    await post(client, COMPLETIONS, prompt=text, max_tokens=1, echo=True, logprobs=0)
    assert [bool(each.blocks) for each in cluster.placed] == [True, False]


async def test_what_one_request_may_ask_is_bounded(client, cluster, monkeypatch):
    monkeypatch.setattr(prepare, "MAX_SCORES", 100)
    body = {"echo": True, "logprobs": 3, "max_tokens": 1}
    await post(client, COMPLETIONS, prompt="a" * 20, **body)  # 20 x (2 + 3)
    response = await client.post(COMPLETIONS, json={"prompt": ["a" * 20, "a"], **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert "105 or more, are more than 100" in error["message"]
