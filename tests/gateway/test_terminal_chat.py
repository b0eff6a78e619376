"""`pd-cluster chat` against the HTTP application."""

from __future__ import annotations

import asyncio
import io
from functools import partial

import pytest
from rich.console import Console

from pd_cluster.chat import Turn, open_chat, talk
from pd_cluster.config import validate_config
from pd_cluster.errors import StartError
from pd_cluster.types import Output, unpack_ints
from tests.gateway.conftest import serve

pytestmark = pytest.mark.anyio
HELLO = "Hello, wörld 🌍!"


def shown_prompt(cluster, tokenizer) -> str:
    ids = unpack_ints(cluster.started[-1].tokens).tolist()
    return tokenizer.decode(ids, skip_special_tokens=False)


async def say(url: str, *lines: str, **options: object) -> str:
    """What a terminal shows of a talk of these lines, each as the person types it."""
    output, typed = io.StringIO(), iter(lines)
    console = Console(file=output, width=200)

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    console.input = read  # type: ignore[method-assign, assignment]
    await asyncio.to_thread(lambda: talk(open_chat(url, **options), console))  # type: ignore[arg-type]
    return output.getvalue()


async def test_each_turn_shows_what_the_caches_did(app, cluster, tokenizer):
    cluster.prefill_hit = 3
    async with serve(app) as url:
        shown = await say(url, "Hi", "", "/what", "Again", "/exit", "never", system="Be kind.")
    assert shown.count(HELLO) == 2
    first, second = (line for line in shown.splitlines() if "prompt tokens cached" in line)
    answered = len(HELLO.encode()) + 1
    assert first.startswith("3 of ")
    assert f"{answered} tokens" in first
    assert "tokens/s" in first
    assert "first token after" in second
    assert "unknown command" in shown
    # The turn before, whole, is in the next one's prompt.
    prompt = shown_prompt(cluster, tokenizer)
    for part in ("Be kind.", "Hi", HELLO, "Again"):
        assert part in prompt
    assert len(cluster.started) == 2


async def test_reset_forgets_all_but_the_system_prompt(app, cluster, tokenizer):
    async with serve(app) as url:
        await say(url, "Hi", "/reset", "Again", system="Be kind.", temperature=0.0, max_tokens=2)
    prompt = shown_prompt(cluster, tokenizer)
    assert "Be kind." in prompt
    assert "Again" in prompt
    assert "Hi" not in prompt
    params = cluster.started[-1].params
    assert (params.temperature, params.max_tokens) == (0, 2)


async def test_a_turn_that_fails_is_forgotten(app, cluster):
    async with serve(app) as url:
        chat = await asyncio.to_thread(open_chat, url)
        cluster.config = validate_config({"max_attempts": 1})
        cluster.driver.config = cluster.config
        cluster.troubles[2] = Output(attempt=None, outcome="failed", message="no luck")  # type: ignore[arg-type]
        turn = Turn()
        with pytest.raises(StartError, match="no luck"):
            await asyncio.to_thread(lambda: list(chat.say("Hi", turn)))
        assert (turn.text, chat.messages) == ("He", [])
        shown = await say(url, "x" * 2000, "Hi")
        assert "error:" in shown
        assert HELLO in shown


async def test_keys_and_servers_that_are_none(cluster, make_app):
    cluster.config = validate_config({"api_keys": ["one"]})
    async with serve(make_app(cluster)) as url:
        assert HELLO in await say(url, "Hi", api_key="one")
        with pytest.raises(StartError, match="401 .* --api-key"):
            await asyncio.to_thread(partial(open_chat, url, api_key="two"))
    with pytest.raises(StartError, match="does not answer"):
        await asyncio.to_thread(open_chat, "http://127.0.0.1:9")
