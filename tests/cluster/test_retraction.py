"""A real decode worker whose memory holds a third of what is asked of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.conftest import Judge
from tests.cluster.live import live
from tests.cluster.test_movement import tokens

pytestmark = pytest.mark.cluster
REQUESTS, PROMPT, ANSWER, POOL = 12, 16, 48, 256


# CI takes one of them: its time is bounded. Both run in virtual time in every run.
@pytest.mark.parametrize("policy", ["length", pytest.param("priority", marks=pytest.mark.slow)])
def test_a_third_of_the_demand_serves_all(policy: str, judge: Judge) -> None:
    """Every request finishes with the tokens that it would have alone; retractions are counted."""
    prompts = [tokens(PROMPT, seed=50 + number) for number in range(REQUESTS)]
    # Admission that hardly counts growth lets more in than there is room for.
    careless = {"schedule_conservativeness": 0.05, "max_total_tokens": POOL}
    with live(retraction_policy=policy, **careless) as cluster:

        def ask(number: int) -> Any:
            body = {
                "input_ids": prompts[number],
                "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
                **({"priority": number % 3} if policy == "priority" else {}),
            }
            reply = cluster.http.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()["output_ids"]

        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        cluster.settle()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == ANSWER
            judge.check(prompt, answer)
        (decode,) = (each for each in cluster.info()["workers"] if each["role"] == "decode")
        assert decode["retractions"][policy] > 0
        assert decode["retracted_tokens"] > PROMPT
        labels = f'policy="{policy}",role="decode",worker="decode-0"'
        counted = f"pd_retractions_total{{{labels}}} {decode['retractions'][policy]:.1f}\n"
        assert counted in cluster.scrape()
        assert cluster.info()["coordinator"]["attempts"]["retracted"] > 0
