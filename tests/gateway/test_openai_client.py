"""The `openai` package against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from pd_cluster.config import validate_config
from pd_cluster.types import AttemptId, Output, Rejection

pytestmark = pytest.mark.anyio
HELLO = "Hello, wörld 🌍!"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def api(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        yield api


async def test_models(api):
    models = await api.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await api.models.retrieve("tiny")).owned_by == "pd-cluster"
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("other")


async def test_chat(api, cluster):
    cluster.prefill_hit = 2
    answer = await api.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            *MESSAGES,
        ],
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        stop=["nothing"],
        max_completion_tokens=50,
        extra_body={"top_k": 5, "ignore_eos": False, "stop_token_ids": [3], "cache_salt": "me"},
    )
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    (start,) = cluster.started
    assert start.namespace == "me"
    assert (start.params.temperature, start.params.top_p, start.params.top_k) == (0.5, 0.9, 5)
    assert (start.params.max_tokens, start.params.stop_token_ids) == (50, (3, 257))
    assert start.params.seed == 2**63 - 7


async def test_a_seed_is_chosen(api, cluster):
    for _ in range(2):
        await api.chat.completions.create(model="tiny", messages=MESSAGES)
    seeds = {start.params.seed for start in cluster.started}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_chat_stream(api):
    stream = await api.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == HELLO
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(HELLO.encode()) + 1


async def test_completions_of_all_kinds_of_prompts(api):
    for prompt, count in (
        ("abc", 1),
        (["a", "b", "c"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
    ):
        answer = await api.completions.create(model="tiny", prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == ["Hello"] * count
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage.completion_tokens == 5 * count


async def test_completions_stream_of_several_prompts(api):
    stream = await api.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=30, stream=True, stop="rld"
    )
    texts, reasons = {0: "", 1: ""}, {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "Hello, wö", 1: "Hello, wö"}
    assert reasons == {0: "stop", 1: "stop"}


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "count"),
    [(1, False, 1), (100, True, 100), (100, False, len(HELLO.encode()) + 1)],
)
async def test_exact_counts_case_26(api, max_tokens, ignore_eos, count):
    answer = await api.completions.create(
        model="tiny", prompt=[5], max_tokens=max_tokens, extra_body={"ignore_eos": ignore_eos}
    )
    assert answer.usage.completion_tokens == count
    assert answer.usage.prompt_tokens == 1
    assert answer.choices[0].finish_reason == ("length" if count == max_tokens else "stop")


async def test_errors(api, cluster):
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(model="tiny", messages=MESSAGES, n=0)
    assert caught.value.param == "n"
    cluster.place_answers = [
        Rejection(attempt=AttemptId("", 1), status=429, reason="queue_full", message="full")
    ]
    with pytest.raises(openai.RateLimitError) as limited:
        await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert limited.value.response.headers["retry-after"] == "1"


async def test_an_error_in_the_middle_reaches_the_client_case_27(api, cluster):
    cluster.driver.config = validate_config({"max_attempts": 1})
    cluster.troubles[2] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="it died"):
        await read()
    assert "".join(texts) == "He"


async def test_leaving_a_stream_stops_the_work_case_1(api, cluster, wait_until):
    cluster.gates[3] = asyncio.Event()
    stream = await api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async with stream:
        async for _ in stream:
            break
    await wait_until(lambda: cluster.idle)
    assert len(cluster.cancelled) == 1


async def test_a_worker_lost_on_the_way_is_not_seen(api, cluster):
    cluster.troubles[5] = Output(attempt=AttemptId("", 0), outcome="failed", message="died")
    answer = await api.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == HELLO
    assert answer.usage.completion_tokens == len(HELLO.encode()) + 1
    assert len(cluster.started) == 2
