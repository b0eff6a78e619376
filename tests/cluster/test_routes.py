"""Placement by the caches of both sides, on a real cluster: the routes of a conversation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_cluster.model.tokenizer import Tokenizer
from tests.cluster.conftest import Judge
from tests.cluster.live import Live, live
from tests.cluster.test_exact import common_prefix

pytestmark = pytest.mark.cluster


ROUTES = [
    pytest.param({"routes": ["remote", "remote+pull"]}, "remote+pull", id="1+1-pull"),
    pytest.param(
        {"routes": ["remote", "local"], "prefill": 2, "decode": 2},
        "local",
        id="2+2-local",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Live]:
    with live(placement="cost", **request.param) as running:
        yield running


@pytest.mark.parametrize(("cluster", "route"), ROUTES, indirect=["cluster"])
def test_a_conversation_computes_only_what_is_new(
    cluster: Live, route: str, tokenizer: Tokenizer, judge: Judge
) -> None:
    """What only decode holds, the last answer, is read by prefill or used where it is.

    By route `remote` alone it is computed again: tests/cluster/test_exact.py.
    """
    messages = [{"role": "user", "content": "Describe a lighthouse and its keeper at length."}]
    held: list[int] = []
    for follow_up in ("And the sea?", "And the ships?", ""):
        prompt = tokenizer.apply_chat_template(messages)
        before, placed = cluster.moved(), placements(cluster)
        answer = cluster.generate(prompt, 200, ignore_eos=True)
        cluster.settle()
        judge.check(prompt, answer.tokens)
        computed = (cluster.moved() - before).computed
        assert computed <= len(prompt) - common_prefix(held, prompt) + cluster.config.page_size
        after = placements(cluster)
        taken = [name for name in after if after[name] > placed.get(name, 0)]
        assert taken == [route if held else "remote"]
        held = prompt + answer.tokens[:-1]
        text = tokenizer.decode(answer.tokens)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]


def placements(cluster: Live) -> dict[str, int]:
    counts: dict[str, int] = cluster.info()["coordinator"]["placements"]
    return counts
