"""What the gateway counts of its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import pytest

from pd_cluster.types import AttemptId, Output

pytestmark = pytest.mark.anyio


async def scrape(client) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = re.findall(r"^(pd_\S+) (\S+)$", response.text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


async def test_a_request(client, cluster):
    cluster.prefill_hit = 1
    cluster.troubles[3] = Output(attempt=AttemptId("", 0), outcome="failed", message="it died")
    await client.post("/generate", json={"text": "abcd", "sampling_params": {"max_new_tokens": 6}})
    found = await scrape(client)
    for name, value in {
        'pd_time_to_first_token_seconds_count{model="tiny"}': 1,
        'pd_inter_token_latency_seconds_count{model="tiny"}': 5,
        'pd_e2e_request_latency_seconds_count{model="tiny"}': 1,
        'pd_request_stage_seconds_count{model="tiny",stage="tokenize"}': 1,
        'pd_request_stage_seconds_count{model="tiny",stage="queue"}': 2,
        'pd_prompt_tokens_total{model="tiny"}': 4,
        'pd_generation_tokens_total{model="tiny"}': 6,
        'pd_prompt_tokens_by_source_total{model="tiny",source="computed"}': 3,
        'pd_prompt_tokens_by_source_total{model="tiny",source="prefill_hit"}': 1,
        'pd_request_total{finish_reason="length",model="tiny"}': 1,
        'pd_request_recovered_total{cause="failed",model="tiny"}': 1,
        'pd_num_requests_running{role="gateway",worker="gateway"}': 0,
        'pd_num_requests_retracted{role="gateway",worker="gateway"}': 0,
    }.items():
        assert found[name] == value, name
    # A gateway exports itself alone: scraping several counts nothing twice.
    assert not [name for name in found if "decode-0" in name or "coordinator" in name]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
async def test_each_route_times_its_tokenisation(client, path, body):
    await client.post(path, json=body)
    found = await scrape(client)
    assert found['pd_request_stage_seconds_count{model="tiny",stage="tokenize"}'] == 1


async def test_ttft_starts_at_arrival_before_tokenisation(client, cluster, tokenizer, monkeypatch):
    encode, generate = tokenizer.encode, cluster.generate
    tokenised: list[float] = []

    def note_time(text: str, **options: bool) -> list[int]:
        tokenised.append(cluster.driver.clock())
        return encode(text, **options)

    def minutes_ago(request):
        assert request.arrival <= tokenised[0]
        return generate(dataclasses.replace(request, arrival=request.arrival - 300))

    monkeypatch.setattr(tokenizer, "encode", note_time)
    monkeypatch.setattr(cluster, "generate", minutes_ago)
    await client.post("/generate", json={"text": "abc"})
    found = await scrape(client)
    assert found['pd_time_to_first_token_seconds_sum{model="tiny"}'] >= 300
    assert found['pd_e2e_request_latency_seconds_sum{model="tiny"}'] >= 300
    assert found['pd_request_stage_seconds_sum{model="tiny",stage="queue"}'] < 300


async def test_gauges_while_it_runs_and_after_a_burst_of_aborts(call, client, cluster, wait_until):
    cluster.gates[1] = asyncio.Event()
    running = [call("/generate", {"text": f"a{index}"}) for index in range(5)]
    await wait_until(lambda: cluster.driver.count_running() == 5)
    gauge = 'pd_num_requests_running{role="gateway",worker="gateway"}'
    assert (await scrape(client))[gauge] == 5
    for each in running:
        each.hang_up()
        await each.task
    found = await scrape(client)
    assert found[gauge] == 0
    assert found['pd_request_total{finish_reason="abort",model="tiny"}'] == 5
