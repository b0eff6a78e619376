"""The HTTP API under requests that its own OpenAPI document describes, and under those that it
forbids: whatever comes, the answer is no server error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode

from pd_cluster.config import Config, validate_config
from pd_cluster.gateway.openapi import openapi_document
from tests.gateway.conftest import CAPACITY, CONTEXT, EOS, FakeCluster

# For each route and mode: a few hundred in all.
EXAMPLES = 25
OPERATIONS = [
    (path, method) for path, item in openapi_document()["paths"].items() for method in item
]


@pytest.fixture
def cluster(make_cluster: Callable[[Config], FakeCluster]) -> FakeCluster:
    config = validate_config(
        {
            "max_total_tokens": CAPACITY,
            "context_length": CONTEXT,
            "admin_key": "k",
            "enable_priority_scheduling": True,
            "schedule_policy": "routing-key",
        }
    )
    cluster = make_cluster(config)
    cluster.reply = [72, 200, 3, 256, EOS]
    return cluster


@pytest.fixture
def schema(cluster: FakeCluster, make_app: Callable[..., FastAPI]) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(cluster))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_server_error(
    schema: schemathesis.BaseSchema,
    cluster: FakeCluster,
    path: str,
    method: str,
    mode: GenerationMode,
) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = tame(whole_numbers(case.body))
        response = case.call(headers={"authorization": "Bearer k"})
        statuses.add(response.status_code)
        assert response.status_code < 500, (case.body, response.text)
        if response.status_code >= 400 and method != "head":
            assert response.json()["error"]["message"]

    # A route without parameters has no wrong ones.
    with suppress(Unsatisfiable):
        run()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert 200 in statuses
    assert cluster.idle


def tame(body: dict[str, Any]) -> dict[str, Any]:
    """What no schema can say: the model's limits, and which fields agree. Most of what is generated
    would otherwise end at the first check.
    """
    body = {key: value for key, value in body.items() if key != "model"}
    for key in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        if isinstance(body.get(key), int):
            body[key] = 8 if key != "max_completion_tokens" else body.get("max_tokens") or 8
    for key in ("min_tokens", "min_new_tokens", "n", "best_of"):
        if isinstance(body.get(key), int):
            body[key] = 2 if key != "best_of" else body.get("n") or 1
    if isinstance(body.get("timeout"), int | float):
        body["timeout"] = 60  # a shorter one is a 504 where the machine is slow
    if "top_logprobs" in body:
        body["logprobs"] = True
    if "top_logprobs_num" in body:
        body["return_logprob"] = True
    if body.get("text") is not None:
        body.pop("input_ids", None)
        body["text"] = [each or "a" for each in body["text"]] or "a"
        body.pop("rid", None)
    elif body.get("input_ids") is not None:
        body.pop("text", None)
        body.pop("rid", None)
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(key) % EOS): each for key, each in body["logit_bias"].items()}
    if not body.get("stream"):
        body.pop("stream_options", None)
    body.pop("tools", None)  # whether they may be there, the model's template says
    if isinstance(body.get("messages"), list):
        body["messages"] = [_message(each) for each in body["messages"]]
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = tame(body["sampling_params"])
        body["sampling_params"].pop("sampling_seed", None)
    return {
        key: _ids(value) if key in ("input_ids", "prompt", "stop_token_ids") else value
        for key, value in body.items()
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Without what only other roles have, and with the content that all need."""
    of = {"tool_calls": "assistant", "tool_call_id": "tool"}
    kept = {
        key: each
        for key, each in message.items()
        if of.get(key, message["role"]) == message["role"]
    }
    return kept | ({"content": "a"} if kept.get("content") is None else {})


def whole_numbers(value: Any) -> Any:
    """To JSON Schema 2.0 is an integer, to us it is none."""
    if isinstance(value, dict):
        return {key: whole_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_ids(each) for each in value]
    if isinstance(value, str):
        return value or "a"
    return value % EOS if isinstance(value, int) and not isinstance(value, bool) else value
