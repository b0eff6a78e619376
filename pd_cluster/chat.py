"""`pd-cluster chat`: a chat in the terminal that shows what the caches did for each turn."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from pd_cluster.errors import StartError


@dataclass
class Turn:
    """What one answer was and cost; times are seconds."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def summary(self) -> str:
        later = self.completion_tokens - 1
        spent = self.total_s - self.first_token_s
        speed = f", {later / spent:.1f} tokens/s" if later > 0 and spent > 0 else ""
        return (
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached, first token after"
            f" {self.first_token_s * 1000:.0f} ms, {self.completion_tokens} tokens{speed}"
        )


@dataclass
class Chat:
    """A conversation with the server at `url`."""

    url: str
    model: str
    temperature: float | None = None
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets every turn."""
        self.messages = [each for each in self.messages if each["role"] == "system"]

    def say(self, text: str, turn: Turn) -> Iterator[str]:
        """Asks, and gives the answer's text as it comes; `turn` is filled in.

        Raises StartError where the server does not answer as it should; the turn is then forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            for piece in self._stream(turn):
                turn.text += piece
                yield piece
        except (httpx.HTTPError, ValueError) as error:
            self.messages.pop()
            raise StartError(f"{self.url}: {error}") from error
        self.messages.append({"role": "assistant", "content": turn.text})

    def _stream(self, turn: Turn) -> Iterator[str]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        start = time.monotonic()
        route = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", route, json=body, headers=self.headers, timeout=600) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ValueError(reply.json()["error"]["message"])
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if usage := event.get("usage"):
                    turn.prompt_tokens = usage["prompt_tokens"]
                    turn.completion_tokens = usage["completion_tokens"]
                    turn.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        if not turn.text and not turn.first_token_s:
                            turn.first_token_s = time.monotonic() - start
                        yield piece
        turn.total_s = time.monotonic() - start


def open_chat(
    url: str,
    *,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    api_key: str | None = None,
) -> Chat:
    """A conversation with the first model of a server. Raises StartError where none answers."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=15)
        reply.raise_for_status()
        model = reply.json()["data"][0]["id"]
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "; give its key by --api-key" if status == 401 else ""
        raise StartError(f"{url} refuses: {status} {error.response.reason_phrase}{hint}") from error
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise StartError(f"{url} does not answer: {error}") from error
    messages = [{"role": "system", "content": system}] if system else []
    return Chat(url, model, temperature, max_tokens, messages, headers)


def talk(chat: Chat, console: Console) -> None:
    """Reads lines until /exit or the end of input; /reset starts anew."""
    console.print(f"[dim]{chat.model} at {chat.url}; /reset forgets, /exit or Ctrl-D ends[/dim]")
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            console.print("unknown command; there are /reset and /exit")
        elif text:
            turn = Turn()
            try:
                for piece in chat.say(text, turn):
                    console.print(piece, end="", markup=False, highlight=False)
            except StartError as error:
                console.print(f"\nerror: {error}", markup=False)
                continue
            console.print(f"\n[dim]{turn.summary()}[/dim]")
