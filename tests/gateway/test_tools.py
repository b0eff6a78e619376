"""Tools are told to models whose template has a place for them; calls stay in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_cluster.types import unpack_ints
from tests.gateway.conftest import asgi_client, make_tokenizer

pytestmark = pytest.mark.anyio
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
# As models' own: arguments are objects, and messages are of four roles.
KNOWS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }}:{{ call.function.arguments.city }}</call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "How is it in Paris?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
TURN = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
RENDERED = "[user]How is it in Paris?[assistant]<call>weather:Paris</call>[tool]sunny[assistant]"


@pytest.fixture
def knowing(tmp_path, cluster, make_app):
    """Gives a client of a server whose model has this template, and the prompt it sent last."""

    def make(template: Any = KNOWS):
        tokenizer = make_tokenizer(tmp_path, template)
        client = asgi_client(make_app(cluster, tokenizer=tokenizer, context_length=2048))

        async def prompt(**body: Any) -> str:
            response = await client.post(CHAT, json={"max_tokens": 1, **body})
            assert response.status_code == 200, response.text
            ids = unpack_ints(cluster.started[-1].tokens)
            return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

        return client, prompt

    return make


async def test_a_turn_with_tools_is_rendered(knowing):
    _, prompt = knowing()
    shown = await prompt(messages=TURN, tools=[WEATHER])
    assert shown == f"<tools>{json.dumps(WEATHER)}</tools>{RENDERED}"
    assert await prompt(messages=TURN) == RENDERED


@pytest.mark.parametrize(("choice", "told"), [(None, True), ("auto", True), ("none", False)])
async def test_choice(knowing, choice, told):
    _, prompt = knowing()
    shown = await prompt(messages=[USER], tools=[WEATHER], tool_choice=choice)
    assert shown.startswith("<tools>") == told


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_calls_are_not_enforced(knowing, cluster, choice):
    client, _ = knowing()
    body = {"messages": [USER], "tools": [WEATHER], "tool_choice": choice}
    response = await client.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert "neither enforced nor parsed" in error["message"]
    assert not cluster.placed


async def test_a_template_of_its_own_for_tools(knowing):
    """As some models bring it, under the name that transformers looks for."""
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    _, prompt = knowing(templates)
    assert await prompt(messages=[USER]) == "plain"
    assert await prompt(messages=[USER], tools=[WEATHER, WEATHER]) == "2 tools"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER], "tools": [WEATHER]}, "tools"),
        ({"messages": TURN}, "messages"),
    ],
)
async def test_a_template_that_knows_no_tools_refuses_them(client, cluster, body, param):
    for path in (CHAT, TOKENIZE):
        response = await client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "knows no tools" in error["message"]
    assert not cluster.placed
    # Where none may be called, none are told of.
    plain = {"messages": [USER], "tools": [WEATHER], "tool_choice": "none"}
    assert (await client.post(CHAT, json=plain)).status_code == 200


def with_call(**changes: Any) -> list[dict[str, Any]]:
    function = {**CALL["function"], **changes}
    return [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (with_call(arguments="{"), "messages", "not a JSON object"),
        (with_call(arguments="[1]"), "messages", "expected an object, not an array"),
        (with_call(arguments={}), "messages.1.tool_calls.0.function.arguments", "string"),
        ([{"role": "user", "content": "", "tool_calls": [CALL]}], "messages.0.tool_calls", "role"),
        ([{**USER, "tool_call_id": "c"}], "messages.0.tool_call_id", "role 'tool'"),
        ([{"role": "tool"}], "messages.0.content", "string"),
    ],
)
async def test_what_is_no_turn_with_tools(knowing, cluster, messages, param, words):
    client, _ = knowing()
    response = await client.post(CHAT, json={"messages": messages})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert not cluster.placed
