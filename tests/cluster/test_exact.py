"""Invariant 5 on a real cluster: the same tokens by every route, and the route meant was taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.conftest import Judge
from tests.cluster.live import Generated, Live, Moved, live

pytestmark = pytest.mark.cluster

ANSWER = 64

SHAPES = [
    pytest.param({"page_size": 1, "layout": "page_first"}, id="page1-page_first"),
    pytest.param({"page_size": 16, "layout": "page_first"}, id="page16-page_first"),
    pytest.param({"page_size": 1, "layout": "layer_first"}, id="page1-layer_first"),
    pytest.param({"page_size": 16, "layout": "layer_first"}, id="page16-layer_first"),
]


@pytest.fixture(scope="module", params=SHAPES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Live]:
    with live(**request.param) as running:
        yield running


def ask(cluster: Live, prompts: list[list[int]], at_once: int) -> tuple[list[Generated], Moved]:
    """The answers, and what they moved."""
    before = cluster.moved()
    answers = cluster.generate_all(prompts, ANSWER, at_once, ignore_eos=True)
    cluster.settle()
    return answers, cluster.moved() - before


def pages(cluster: Live, tokens: int) -> int:
    return -(-tokens // cluster.config.page_size)


def full_pages(cluster: Live, tokens: int) -> int:
    return tokens // cluster.config.page_size


def test_cold_and_warm_on_either_side(
    cluster: Live, prompts: list[list[int]], judge: Judge
) -> None:
    size = cluster.config.page_size
    total = sum(len(prompt) for prompt in prompts)
    total_pages = sum(pages(cluster, len(prompt)) for prompt in prompts)
    tails = sum(len(prompt) % size > 0 for prompt in prompts)

    # One at a time is cold for sure; the texts share no prefix, the chats their template.
    cluster.flush()
    cold, moved = ask(cluster, prompts, at_once=1)
    for prompt, answer in zip(prompts, cold, strict=True):
        assert len(answer.tokens) == ANSWER
        judge.check(prompt, answer.tokens)
    assert cold[0].cached_tokens == 0
    assert moved.computed + moved.prefill_hits == total
    assert moved.written_pages == total_pages - moved.resident_pages

    # All pages are on both sides: nothing full moves, one token (or a copied page's last) computed.
    both, moved = ask(cluster, prompts, at_once=16)
    assert [answer.tokens for answer in both] == [answer.tokens for answer in cold]
    for prompt, answer in zip(prompts, both, strict=True):
        assert answer.cached_tokens == min(full_pages(cluster, len(prompt)) * size, len(prompt) - 1)
    assert moved.written_pages == tails
    assert moved.resident_pages == total_pages - tails

    cluster.flush("decode")
    on_prefill, moved = ask(cluster, prompts[:8], at_once=2)
    assert [answer.tokens for answer in on_prefill] == [answer.tokens for answer in cold[:8]]
    assert all(answer.cached_tokens > 0 for answer in on_prefill)
    asked = sum(pages(cluster, len(prompt)) for prompt in prompts[:8])
    assert moved.written_pages == asked - moved.resident_pages

    cluster.flush("prefill")
    on_decode, moved = ask(cluster, prompts[:8], at_once=2)
    assert [answer.tokens for answer in on_decode] == [answer.tokens for answer in cold[:8]]
    assert moved.written_pages == sum(len(prompt) % size > 0 for prompt in prompts[:8])
    assert moved.computed > sum(len(prompt) for prompt in prompts[:8]) / 4


def test_half_a_prefix(cluster: Live, prompts: list[list[int]], judge: Judge) -> None:
    chosen = [prompt for prompt in prompts if 16 < len(prompt) < 200]
    cluster.flush()
    for prompt in chosen:
        cluster.generate(prompt[: len(prompt) // 2], 1)
    before = cluster.moved()
    for prompt in chosen:
        answer = cluster.generate(prompt, ANSWER, ignore_eos=True)
        judge.check(prompt, answer.tokens)
        half = full_pages(cluster, len(prompt) // 2) * cluster.config.page_size
        assert half <= answer.cached_tokens < len(prompt)
    moved = cluster.moved() - before
    total = sum(pages(cluster, len(prompt)) for prompt in chosen)
    assert moved.written_pages == total - moved.resident_pages
    assert moved.resident_pages >= sum(full_pages(cluster, len(each) // 2) for each in chosen)


def test_turns_of_a_chat(cluster: Live, tokenizer: Tokenizer, judge: Judge) -> None:
    """Turns 2 and 3 find the earlier turns' prompts on prefill, their answers too on decode."""
    cluster.flush()
    messages = [{"role": "user", "content": "Name a fruit and describe it at length."}]
    previous: list[int] = []
    for follow_up in ("Now a vegetable.", "Which is sweeter?", None):
        prompt = tokenizer.apply_chat_template(messages)
        shared = common_prefix(previous, prompt)
        before = cluster.moved()
        answer = cluster.generate(prompt, ANSWER)
        cluster.settle()
        judge.check(prompt, answer.tokens)
        moved = cluster.moved() - before
        assert moved.resident_pages >= full_pages(cluster, shared)
        assert moved.written_pages == pages(cluster, len(prompt)) - moved.resident_pages
        previous = prompt + answer.tokens[:-1]
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": follow_up or ""})


def test_sixteen_at_once_cold(cluster: Live, prompts: list[list[int]], judge: Judge) -> None:
    cluster.flush()
    chosen = [prompt for prompt in prompts if len(prompt) < 1000][:16]
    answers, moved = ask(cluster, chosen, at_once=16)
    for prompt, answer in zip(chosen, answers, strict=True):
        judge.check(prompt, answer.tokens)
    assert moved.computed + moved.prefill_hits == sum(len(prompt) for prompt in chosen)
    assert moved.written_pages + moved.resident_pages == sum(pages(cluster, len(p)) for p in chosen)


def common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
