"""Placement by the caches of both sides, on a real cluster: the routes of a conversation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.conftest import Judge
from tests.cluster.live import Live, live
from tests.cluster.test_exact import common_prefix

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with live(placement="cost") as running:
        yield running


def test_a_conversation_computes_only_what_is_new(
    cluster: Live, tokenizer: Tokenizer, judge: Judge
) -> None:
    """What only decode holds, the last answer, is read by prefill or used where it is."""
    messages = [{"role": "user", "content": "Describe a lighthouse and its keeper at length."}]
    held: list[int] = []
    routes = set()
    for follow_up in ("And the sea?", "And the ships?", "And the storms?"):
        prompt = tokenizer.apply_chat_template(messages)
        before, placed = cluster.moved(), placements(cluster)
        answer = cluster.generate(prompt, 100, ignore_eos=True)
        cluster.settle()
        judge.check(prompt, answer.tokens)
        computed = (cluster.moved() - before).computed
        assert computed <= len(prompt) - common_prefix(held, prompt) + cluster.config.page_size
        after = placements(cluster)
        routes |= {route for route in after if after[route] > placed.get(route, 0)}
        held = prompt + answer.tokens[:-1]
        text = tokenizer.decode(answer.tokens)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
    assert routes & {"remote+pull", "local"}


def placements(cluster: Live) -> dict[str, int]:
    counts: dict[str, int] = cluster.info()["coordinator"]["placements"]
    return counts
