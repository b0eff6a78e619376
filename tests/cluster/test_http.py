"""What users and their programs see of a real cluster."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.nodes import hosts_for
from tests.cluster.conftest import Judge
from tests.cluster.live import Live

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(cluster: Live) -> OpenAI:
    return OpenAI(base_url=f"{cluster.server.url}/v1", api_key="none", max_retries=0)


def metric(cluster: Live, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(cluster.scrape())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_openai_client_chats(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=32,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37


def test_openai_client_streams_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 37
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_sampling_with_a_seed_is_repeatable_alone_and_in_a_crowd(cluster: Live) -> None:
    prompt = list(range(2000, 2040))
    sampling = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    alone = cluster.generate(prompt, 16, **sampling)
    crowd = cluster.generate_all([prompt] * 4, 16, 4, **sampling)
    assert all(answer.tokens == alone.tokens for answer in crowd)
    other = cluster.generate(prompt, 16, **{**sampling, "seed": 8})
    assert other.tokens != alone.tokens


def test_text_that_tokens_cut_streams_whole(client: OpenAI, judge: Judge) -> None:
    stream = client.completions.create(
        model="smollm2", prompt="🥞🥞🥞🥞🥞🥞 从前有座山", max_tokens=24, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    whole = client.completions.create(
        model="smollm2", prompt="🥞🥞🥞🥞🥞🥞 从前有座山", max_tokens=24, temperature=0
    )
    assert text == whole.choices[0].text


def test_the_walk_through_of_three_curls(cluster: Live) -> None:
    """Three prompts with one long prefix, by curl as printed; the hit rate rises each time."""
    cluster.flush()
    prefix = "The following is a summary of the company's FAQ. " * 40 + "Question: "
    rates = []
    for question in ("What is the return policy?", "How much is shipping?", "How many days?"):
        body = json.dumps({"text": prefix + question})
        curl = ["curl", "-s", f"{cluster.server.url}/generate", "-d", body]
        answer = json.loads(subprocess.run(curl, check=True, capture_output=True).stdout)
        assert answer["text"]
        info = cluster.http.get("/get_server_info").json()
        rates.append(info["cache_hit_rate"])
        assert metric(cluster, "pd_prefix_cache_hits_total", role="prefill") >= 0
    assert rates[0] < rates[1] < rates[2]
    text = cluster.http.get("/metrics").text
    assert "prefix_cache_hit" in text
    assert metric(cluster, "pd_prefix_cache_hit_rate", role="prefill") > 0.3


def test_counters_add_up(cluster: Live) -> None:
    before = {
        name: metric(cluster, name)
        for name in (
            "pd_prompt_tokens_total",
            "pd_generation_tokens_total",
            "pd_prompt_tokens_by_source_total",
            "pd_request_total",
        )
    }
    prompt = list(range(3000, 3100))
    cluster.generate(prompt, 5, ignore_eos=True)
    cluster.generate(prompt, 7, ignore_eos=True)
    grown = {name: metric(cluster, name) - value for name, value in before.items()}
    assert grown["pd_prompt_tokens_total"] == 200
    assert grown["pd_prompt_tokens_by_source_total"] == 200
    assert grown["pd_generation_tokens_total"] == 12
    assert grown["pd_request_total"] == 2


def test_models_health_and_ready(cluster: Live) -> None:
    assert cluster.http.get("/v1/models").json()["data"][0]["id"] == "smollm2"
    assert cluster.http.get("/health").status_code == 200
    assert cluster.http.get("/ready").status_code == 200


def test_what_was_chosen_for_the_pools_is_told(cluster: Live) -> None:
    """At the start, and by status --json; each node can say what memory it has."""
    pool = {"tokens": 16384, "pages": 16384, "bytes": 16384 * 46080, "source": "max_total_tokens"}
    assert cluster.info()["kv_pool"] == {"prefill": pool, "decode": pool}
    said = cluster.server.describe()
    for role in ("prefill", "decode"):
        words = f"1 {role} worker: KV pool of 16384 tokens, 720 MiB in 16384 pages of 1"
        assert any(line.startswith(words) for line in said), said
    assert said[-1] == "pools sized by max_total_tokens"
    assert cluster.progress == [
        "fetching the model",
        "preparing the kernels",
        "starting Ray",
        "loading the model in 2 workers",
        "waiting for the workers to register",
    ]
    (host,) = hosts_for(cluster.config, local=False)
    assert host.workers == 2
    assert host.memory > pool["bytes"]


def test_too_long_a_prompt_names_both_numbers_and_reaches_no_worker(cluster: Live) -> None:
    """Case 25."""
    before = cluster.moved()
    reply = cluster.http.post("/v1/completions", json={"prompt": [1000] * 9000, "max_tokens": 1})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "9000" in message
    assert "8192" in message
    assert cluster.moved() == before


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{not json", "JSON"),
        (b'{"prompt": "a", "max_tokens": -1}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        (b'{"prompt": "a", "colour": 1}', "colour"),
        (b'{"prompt": "a", "attempt": 1}', "attempt"),
    ],
)
def test_bad_input_is_a_400_that_names_it(cluster: Live, body: bytes, names: str) -> None:
    """Case 30 among them."""
    headers = {"content-type": "application/json"}
    reply = cluster.http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert names in error["message"] or names == error["param"]


def test_many_streams_at_once_lose_no_token(cluster: Live) -> None:
    prompts = [[5000 + i] * 5 + [6000 + i] for i in range(16)]
    alone = [cluster.generate(prompt, 12, ignore_eos=True).tokens for prompt in prompts[:4]]
    crowd = cluster.generate_all(prompts, 12, 16, ignore_eos=True)
    assert [answer.tokens for answer in crowd[:4]] == alone
    assert all(len(answer.tokens) == 12 for answer in crowd)


def test_a_non_streaming_client_that_leaves_stops_the_work(cluster: Live) -> None:
    """Case 5."""
    before = metric(cluster, "pd_generation_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        cluster.http.post(
            "/v1/completions",
            json={"prompt": "Tell me everything.", "max_tokens": 4000, "ignore_eos": True},
            timeout=httpx.Timeout(30, read=1.0),
        )
    cluster.settle()
    assert metric(cluster, "pd_generation_tokens_total") - before < 2000
