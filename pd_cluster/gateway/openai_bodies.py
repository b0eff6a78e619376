"""The bodies of OpenAI's routes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.protocol import Body, Neutral, Prompt, Sampling, json_type, prompt_list

_ABSENT: Neutral = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "priority": (None, 0),
    "metadata": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
}


class StreamOptions(Body):
    absent = {"continuous_usage_stats": (None, False), "include_obfuscation": (None, False)}

    include_usage: bool | None = None


class OpenAIBody(Sampling):
    """What both OpenAI routes share; `user` is taken and not used."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @field_validator("stream_options")
    @classmethod
    def _only_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only allowed when 'stream' is true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(OpenAIBody):
    absent = {
        **_ABSENT,
        "best_of": (None, 1),
        "echo": (None, False),
        "logprobs": (None,),
        "suffix": (None, ""),
    }

    # Several prompts give several choices.
    prompt: list[Prompt]

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: object) -> list[Prompt]:
        return prompt_list(value)


class ChatMessage(Body):
    """One message; fields that an answer carries as null may be sent back as they are."""

    absent = {
        "refusal": (None,),
        "tool_calls": (None, []),
        "function_call": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "reasoning_content": (None,),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="plain")
    @classmethod
    def _text(cls, value: object) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError(f"must be a string or a list of text parts, not {json_type(value)}")
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"part {index}: only parts of type 'text' are supported")
            if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
                raise ValueError(f"part {index}: a text part has 'type' and the string 'text' only")
        return "".join(part["text"] for part in value)


class ChatBody(OpenAIBody):
    absent = {
        **_ABSENT,
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None, "none"),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise BadRequest(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ",
                param="max_completion_tokens",
            )
        return self
