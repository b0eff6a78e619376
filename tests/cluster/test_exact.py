"""Invariant 5 on a real cluster: the same tokens, whatever of them is held where.

By route `remote`, whose accounts of what moves are exact; test_routes.py has the others.
"""

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
    # CI takes one of this layout: its time is bounded.
    pytest.param(
        {"page_size": 1, "layout": "layer_first"}, id="page1-layer_first", marks=pytest.mark.slow
    ),
    pytest.param({"page_size": 16, "layout": "layer_first"}, id="page16-layer_first"),
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Live]:
    with live(placement="least_loaded", **request.param) as running:
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


@pytest.mark.parametrize(
    ("cluster", "every"),
    [
        pytest.param(SHAPES[0].values[0], 1, id="page1-page_first"),
        # CI takes a part of the prompts with the other: its time is bounded.
        pytest.param(SHAPES[1].values[0], 3, id="page16-page_first-some"),
        pytest.param(SHAPES[1].values[0], 1, id="page16-page_first", marks=pytest.mark.slow),
    ],
    indirect=["cluster"],
)
def test_cold_and_warm_on_either_side(
    cluster: Live, every: int, prompts: list[list[int]], judge: Judge
) -> None:
    prompts = prompts[::every]
    size = cluster.config.page_size
    at_once = 2 if size == 1 else 16
    total = sum(len(prompt) for prompt in prompts)
    total_pages = sum(pages(cluster, len(prompt)) for prompt in prompts)
    tails = sum(len(prompt) % size > 0 for prompt in prompts)

    # Cold but for the chats' template.
    cluster.flush()
    cold, moved = ask(cluster, prompts, at_once)
    for prompt, answer in zip(prompts, cold, strict=True):
        assert len(answer.tokens) == ANSWER
        judge.check(prompt, answer.tokens)
    assert min(answer.cached_tokens for answer in cold) == 0
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
    on_prefill, moved = ask(cluster, prompts, at_once=16)
    assert [answer.tokens for answer in on_prefill] == [answer.tokens for answer in cold]
    assert all(answer.cached_tokens > 0 for answer in on_prefill if answer.prompt_tokens > size)
    assert moved.written_pages == total_pages - moved.resident_pages
    assert moved.written_pages > total_pages / 2

    cluster.flush("prefill")
    on_decode, moved = ask(cluster, prompts, at_once=16)
    assert [answer.tokens for answer in on_decode] == [answer.tokens for answer in cold]
    assert moved.written_pages == tails
    assert moved.resident_pages == total_pages - tails
    assert moved.computed > total / 2


@pytest.mark.parametrize("cluster", SHAPES[:2], indirect=True)
def test_half_a_prefix(cluster: Live, prompts: list[list[int]], judge: Judge) -> None:
    chosen = [prompt for prompt in prompts if 16 < len(prompt) < 200]
    cluster.flush()
    cluster.generate_all([prompt[: len(prompt) // 2] for prompt in chosen], 1, at_once=8)
    cluster.settle()
    answers, moved = ask(cluster, chosen, at_once=8)
    for prompt, answer in zip(chosen, answers, strict=True):
        judge.check(prompt, answer.tokens)
        half = full_pages(cluster, len(prompt) // 2) * cluster.config.page_size
        assert half <= answer.cached_tokens < len(prompt)
    total = sum(pages(cluster, len(prompt)) for prompt in chosen)
    assert moved.written_pages == total - moved.resident_pages
    assert moved.resident_pages >= sum(full_pages(cluster, len(each) // 2) for each in chosen)


@pytest.mark.parametrize("cluster", SHAPES[:2], indirect=True)
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


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(SHAPES[0].values[0], id="page1-page_first", marks=pytest.mark.slow),
        *SHAPES[2:],
    ],
    indirect=True,
)
def test_sixteen_at_once_cold_and_again(
    cluster: Live, prompts: list[list[int]], judge: Judge
) -> None:
    cluster.flush()
    answers, moved = ask(cluster, prompts, at_once=16)
    for prompt, answer in zip(prompts, answers, strict=True):
        judge.check(prompt, answer.tokens)
    total = sum(len(prompt) for prompt in prompts)
    assert moved.computed + moved.prefill_hits == total
    total_pages = sum(pages(cluster, len(prompt)) for prompt in prompts)
    assert moved.written_pages + moved.resident_pages == total_pages

    again, moved = ask(cluster, prompts, at_once=16)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    size = cluster.config.page_size
    assert moved.written_pages == sum(len(prompt) % size > 0 for prompt in prompts)


def common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
