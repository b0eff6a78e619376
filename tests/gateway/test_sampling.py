"""What clients ask of sampling reaches the workers, by each route's own names."""

from __future__ import annotations

import dataclasses

import pytest

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.answer import total_usage
from pd_cluster.gateway.backend import ModelInfo
from pd_cluster.gateway.instructions import Usage
from pd_cluster.gateway.prepare import Preparer, Wishes
from pd_cluster.gateway.protocol import Sampling
from pd_cluster.types import Sources

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SHARED = {
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"7": 2, "0": -100},
    "seed": 5,
}


async def ask(client, path, **fields):
    """A request with one token of prompt; the answer."""
    if path == GENERATE:
        outer = {key: fields.pop(key) for key in ("stream", "timeout") if key in fields}
        body = {"input_ids": [1], "sampling_params": fields, **outer}
    elif path == COMPLETIONS:
        body = {"prompt": [1], **fields}
    else:
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_all_that_workers_know(client, cluster, path):
    names = (
        ("max_new_tokens", "min_new_tokens") if path == GENERATE else ("max_tokens", "min_tokens")
    )
    await ask(client, path, **SHARED, **dict(zip(names, (6, 3), strict=True)))
    (start,) = cluster.started
    params = start.params
    assert params.min_p == 0.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.25
    assert params.logit_bias == ((7, 2.0), (0, -100.0))
    assert (params.max_tokens, params.min_tokens, params.seed) == (6, 3, 5)
    assert params.logprobs == -1


@pytest.mark.parametrize(
    ("path", "fields", "logprobs"),
    [
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, 3),
        (CHAT, {"logprobs": False}, -1),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 5}, 5),
    ],
)
async def test_logprobs(client, cluster, path, fields, logprobs):
    await ask(client, path, **fields)
    assert cluster.started[0].params.logprobs == logprobs


async def test_sequences_of_one_prompt_differ_in_their_number_only(client, cluster):
    answer = await ask(client, COMPLETIONS, n=3, seed=9, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    starts = sorted(cluster.started, key=lambda start: start.sequence)
    assert [start.sequence for start in starts] == [0, 1, 2]
    assert len({start.tokens for start in starts}) == 1
    assert {start.params.seed for start in starts} == {9}
    names = [start.attempt.request for start in starts]
    assert [name.rpartition(".")[2] for name in names] == ["0", "1", "2"]
    assert len({name.rpartition(".")[0] for name in names}) == 1


async def test_without_a_seed_the_sequences_share_one(client, cluster):
    await ask(client, CHAT, n=2, max_tokens=2)
    await ask(client, CHAT, n=2, max_tokens=2)
    seeds = [start.params.seed for start in cluster.started]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


async def test_equal_prompts_of_a_batch_draw_differently_without_a_seed(client, cluster):
    await client.post(COMPLETIONS, json={"prompt": [[1], [1]], "max_tokens": 2})
    assert len({start.params.seed for start in cluster.started}) == 2
    assert [start.sequence for start in cluster.started] == [0, 0]


async def test_usage_counts_a_prompt_once(client, cluster):
    body = {"prompt": ["abc", "ab"], "n": 2, "max_tokens": 4, "ignore_eos": True}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 16
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    text = (await client.post(COMPLETIONS, json={**body, **stream})).text
    assert '"prompt_tokens":5' in text
    assert '"completion_tokens":16' in text


def test_the_cached_part_is_that_of_the_sequence_that_computed_most():
    usages = {
        index: Usage(
            prompt_tokens=3,
            completion_tokens=2,
            sources=Sources(computed=3 - cached, decode_hit=cached),
        )
        for index, cached in {3: 1, 0: 2, 1: 0, 2: 2}.items()
    }
    total = total_usage(usages, 2)
    assert (total.prompt_tokens, total.completion_tokens, total.cached_tokens) == (6, 8, 0 + 1)


async def test_best_of(client, cluster):
    await ask(client, COMPLETIONS, n=2, best_of=2, max_tokens=2)
    response = await client.post(COMPLETIONS, json={"prompt": "a", "best_of": 3})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


async def test_too_many_sequences_in_all(client, cluster):
    response = await client.post(COMPLETIONS, json={"prompt": ["a"] * 3, "n": 100})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert cluster.placed == []


async def test_native_sequences_are_a_list(client, cluster):
    answers = await ask(client, GENERATE, n=2, max_new_tokens=2)
    assert [len(each["output_ids"]) for each in answers] == [2, 2]
    body = {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": {"n": 2}}
    answers = (await client.post(GENERATE, json=body)).json()
    assert [each["meta_info"]["id"] for each in answers] == ["x.0", "x.1", "y.0", "y.1"]


async def test_one_sequence_that_fails_ends_all(client, cluster, wait_until):
    cluster.dead = set(cluster.decode_workers)
    cluster.driver.config = cluster.config.model_copy(update={"max_attempts": 1})
    response = await client.post(
        CHAT, json={"messages": [{"role": "user", "content": "a"}], "n": 3}
    )
    assert response.status_code == 500
    await wait_until(lambda: cluster.idle)
    assert len(cluster.ended) == 3


@pytest.fixture
def preparer(tokenizer) -> Preparer:
    return Preparer(tokenizer, model())


def model(**changes) -> ModelInfo:
    plain = ModelInfo(
        name="m", context_length=64, pool_capacity=64, eos_token_ids=frozenset({257, 2})
    )
    return dataclasses.replace(plain, **changes)


def params_of(preparer: Preparer, max_tokens: int | None = None, **sampling):
    wishes = Wishes(prompt_param="prompt", max_tokens=max_tokens)
    (request,) = preparer.requests("r", [[1, 2]], Sampling(**sampling), wishes, arrival=0.0)
    return request.params


def test_the_models_own_defaults_stand_for_what_is_left_out(tokenizer):
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    preparer = Preparer(tokenizer, model(sampling_defaults=defaults))
    params = params_of(preparer)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    assert params.repetition_penalty == 1.1
    params = params_of(preparer, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)
    assert params.repetition_penalty == 1.0


def test_every_end_of_sequence_ends_unless_ignored(preparer):
    assert params_of(preparer).stop_token_ids == (2, 257)
    assert params_of(preparer, stop_token_ids=[9, 2]).stop_token_ids == (2, 9, 257)
    assert params_of(preparer, ignore_eos=True, stop_token_ids=[9]).stop_token_ids == (9,)


def test_the_coldest_is_greedy(preparer):
    assert params_of(preparer, temperature=1e-30).temperature == 0
    assert params_of(preparer, temperature=0.01).temperature == 0.01


def test_ids_that_the_model_lacks_are_refused(tokenizer):
    preparer = Preparer(tokenizer, model(vocab_size=100))
    with pytest.raises(BadRequest, match="0 to 99"):
        params_of(preparer, stop_token_ids=[100])
