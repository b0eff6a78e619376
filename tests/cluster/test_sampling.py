"""Sampling over a real cluster: what a seed, logprobs, limits, penalties and biases give."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.worker.prefill import SCORED_TOKENS
from tests.cluster.live import Live
from tests.model.reference import Reference

pytestmark = pytest.mark.cluster
EOS = 2


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


def test_prompt_logprobs_are_those_of_a_reference(
    cluster: Live, tokenizer: Tokenizer, reference: Reference
) -> None:
    """Over several chunks; cold, warm, and of a batch; the answer too, or none at all."""
    text = "The quick brown fox jumps over the lazy dog, and nobody knows why. " * 40
    prompt = tokenizer.encode(text)
    assert len(prompt) > 2 * SCORED_TOKENS
    wanted = reference.logits_along(prompt[:1], prompt[1:]).log_softmax(-1)
    ids = torch.tensor(prompt[1:])
    chosen = wanted.gather(1, ids[:, None])[:, 0]
    best = wanted.topk(3)
    cluster.flush()
    body = {"prompt": text, "echo": True, "logprobs": 3, "temperature": 0, "seed": 1}
    for prompts, max_tokens in (([prompt], 2), ([prompt], 0), ([prompt, prompt[:50]], 0)):
        before = cluster.moved()
        reply = cluster.http.post(
            "/v1/completions", json={**body, "prompt": prompts, "max_tokens": max_tokens}
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        computed = (cluster.moved() - before).computed
        assert computed == sum(map(len, prompts)), "prefill computes all of it"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice, ids_of in zip(answer["choices"], prompts, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            assert len(logprobs) == len(ids_of) + max_tokens
            assert logprobs[0] is None
            count = len(ids_of) - 1
            assert logprobs[1 : count + 1] == pytest.approx(chosen[:count].tolist(), abs=1e-4)
            tops = choice["logprobs"]["top_logprobs"]
            assert tops[0] is None
            for at in range(count):
                assert max(tops[at + 1].values()) == pytest.approx(
                    float(best.values[at, 0]), abs=1e-4
                )
            assert choice["text"].startswith(tokenizer.decode(ids_of))
            assert choice["finish_reason"] == "length"
    # The pages that it computed anew were published and sent as any others.
    assert cluster.generate(prompt, 2).cached_tokens == len(prompt) - 1


def ask(cluster: Live, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Any:
    """/generate's answer; what it knows outside of `sampling_params` goes there."""
    outer = {
        key: fields.pop(key) for key in ("return_logprob", "top_logprobs_num") if key in fields
    }
    params = {"max_new_tokens": max_tokens, **fields}
    body = {"input_ids": list(prompt), "sampling_params": params, **outer}
    reply = cluster.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def answers(
    cluster: Live, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> list[list[int]]:
    return [each["output_ids"] for each in ask(cluster, prompt, max_tokens, **fields)]


SEEDED = {"n": 4, "seed": 11, "temperature": 1.0, "ignore_eos": True}


def test_four_sequences_share_the_prompts_pages(cluster: Live) -> None:
    """Computed once, sent once."""
    prompt = list(range(4000, 4090))
    before = cluster.moved()
    reply = ask(cluster, prompt, 12, **SEEDED)
    cluster.settle()
    moved = cluster.moved() - before
    assert moved.computed == len(prompt) + 3  # each later one computes the last token's logits
    assert moved.written_pages == len(prompt)
    # Whichever arrives first computes the prompt.
    assert sorted(each["meta_info"]["cached_tokens"] for each in reply) == [0, 89, 89, 89]


def test_a_seed_gives_the_same_four_alone_in_a_crowd_and_twice(cluster: Live) -> None:
    prompt = list(range(2000, 2040))
    alone = answers(cluster, prompt, 16, **SEEDED)
    assert len({tuple(each) for each in alone}) == 4
    assert answers(cluster, prompt, 16, **SEEDED) == alone
    with ThreadPoolExecutor(6) as pool:
        others = [
            pool.submit(cluster.generate, [3000 + number] * 30, 24, ignore_eos=True)
            for number in range(4)
        ]
        crowd = [pool.submit(answers, cluster, prompt, 16, **SEEDED) for _ in range(2)]
        assert all(each.result() == alone for each in crowd)
        assert all(len(each.result().tokens) == 24 for each in others)
    single = ask(cluster, prompt, 16, **{**SEEDED, "n": 1})
    assert single["output_ids"] == alone[0]
    assert answers(cluster, prompt, 16, **{**SEEDED, "seed": 12}) != alone


def test_openai_choices_and_usage_of_n(cluster: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 6,
        "ignore_eos": True,
        "n": 3,
        "seed": 5,
    }
    first = cluster.http.post("/v1/chat/completions", json=body).json()
    again = cluster.http.post("/v1/chat/completions", json=body).json()
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert first["usage"]["completion_tokens"] == 18
    one = cluster.http.post("/v1/chat/completions", json={**body, "n": 1}).json()
    assert first["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_logprobs_are_those_of_a_reference(
    cluster: Live, tokenizer: Tokenizer, reference: Reference
) -> None:
    """Of the first token too, which another worker chooses; cold and warm."""
    prompt = tokenizer.encode("The three laws of thermodynamics are")
    for temperature in (0.0, 0.0, 1.0):
        answer = ask(
            cluster,
            prompt,
            10,
            temperature=temperature,
            seed=3,
            ignore_eos=True,
            return_logprob=True,
            top_logprobs_num=5,
        )
        tokens, meta = answer["output_ids"], answer["meta_info"]
        wanted = reference.logits_along(prompt, tokens).log_softmax(-1)
        assert len(meta["output_token_logprobs"]) == len(tokens) == 10
        for step, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
            assert token == tokens[step]
            assert logprob == pytest.approx(float(wanted[step, token]), abs=1e-4)
            best = wanted[step].topk(5).values.tolist()
            top = meta["output_top_logprobs"][step]
            assert [each[0] for each in top] == pytest.approx(best, abs=1e-4)
            for logprob, token, _ in top:
                assert logprob == pytest.approx(float(wanted[step, token]), abs=1e-4)


def test_exact_counts_case_26(cluster: Live, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat)
    short = ask(cluster, prompt, 64, temperature=0)
    assert short["text"] == "The capital of France is Paris."
    assert short["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    count = len(short["output_ids"])
    assert len(ask(cluster, prompt, 1, temperature=0)["output_ids"]) == 1
    longer = ask(cluster, prompt, 100, temperature=0, min_new_tokens=100)
    assert len(longer["output_ids"]) == 100
    assert EOS not in longer["output_ids"][:-1]
    assert longer["output_ids"][: count - 1] == short["output_ids"][:-1]
    ignoring = ask(cluster, prompt, 30, temperature=0, ignore_eos=True)
    assert len(ignoring["output_ids"]) == 30
    assert ignoring["output_ids"][:count] == short["output_ids"]
    assert len(ask(cluster, prompt[:1], 5, temperature=0, ignore_eos=True)["output_ids"]) == 5


def test_stops(cluster: Live, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat)
    answer = ask(cluster, prompt, 64, temperature=0, stop=["nce is P"])
    assert answer["text"] == "The capital of Fra"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "nce is P"}
    whole = ask(cluster, prompt, 64, temperature=0)["output_ids"]
    answer = ask(cluster, prompt, 64, temperature=0, stop_token_ids=[whole[4]])
    assert answer["output_ids"] == whole[:5]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[4]}


def test_biases_and_penalties(cluster: Live) -> None:
    prompt = list(range(7000, 7030))
    a, b = 500, 600
    greedy = {"temperature": 0, "ignore_eos": True}
    only = ask(cluster, prompt, 8, **greedy, logit_bias={str(a): 100})
    assert only["output_ids"] == [a] * 8
    usual = ask(cluster, prompt, 8, **greedy)["output_ids"]
    without = ask(cluster, prompt, 8, **greedy, logit_bias={str(usual[0]): -100})["output_ids"]
    assert usual[0] not in without
    # Each time that `a` comes it loses 2, until `b` is ahead.
    biases = {str(a): 100, str(b): 95}
    both = ask(cluster, prompt, 40, **greedy, logit_bias=biases, frequency_penalty=2)["output_ids"]
    assert set(both) == {a, b}
    penalised = ask(cluster, [a] * 30, 8, **greedy, repetition_penalty=100)["output_ids"]
    assert a not in penalised
    assert len(set(penalised)) == 8


def test_a_client_that_leaves_ends_all_of_its_sequences(cluster: Live) -> None:
    with pytest.raises(httpx.ReadTimeout):
        cluster.http.post(
            "/v1/completions",
            json={"prompt": "Tell me.", "max_tokens": 3000, "ignore_eos": True, "n": 3},
            timeout=httpx.Timeout(30, read=1.0),
        )
    cluster.settle()


def test_the_story_of_a_request(cluster: Live) -> None:
    body = {"prompt": "One", "max_tokens": 2, "n": 2, "ignore_eos": True}
    reply = cluster.http.post("/v1/completions", json=body, headers={"x-request-id": "told"})
    assert reply.headers["x-request-id"] == "told"
    story = cluster.http.get("/admin/requests/told").json()
    assert [each["state"] for each in story["sequences"]] == ["finished", "finished"]
    assert all(each["completion_tokens"] == 2 for each in story["sequences"])
