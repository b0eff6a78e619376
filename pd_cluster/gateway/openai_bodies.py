"""The bodies of OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.messages import MAX_TOOLS, ChatMessage, Tool, ToolChoice
from pd_cluster.gateway.protocol import (
    MAX_TOP_LOGPROBS,
    PROMPT_SCHEMA,
    Body,
    Namespace,
    Neutral,
    Priority,
    Prompt,
    RoutingKey,
    Sampling,
    prompt_list,
)

_ABSENT: Neutral = {
    "metadata": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
}


class StreamOptions(Body):
    absent = {"continuous_usage_stats": (None, False), "include_obfuscation": (None, False)}

    include_usage: bool | None = None


class OpenAIBody(Sampling):
    """What both OpenAI routes share; `user` is taken and not used.

    `timeout` (seconds) bounds the whole request, as the server's own limit does.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Namespace | None = None
    priority: Priority | None = None
    routing_key: RoutingKey | None = None
    timeout: float | None = Field(None, gt=0)

    @field_validator("stream_options")
    @classmethod
    def _only_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only allowed when 'stream' is true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _scores_in_one_piece(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("'prompt_logprobs' needs 'stream': false", param="prompt_logprobs")
        return self

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens to report with each token; -1: no logprobs."""
        raise NotImplementedError

    @property
    def num_scores(self) -> int:
        """The same, of the prompt's tokens."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs


class CompletionBody(OpenAIBody):
    """Several prompts give several choices, `n` of each in a row."""

    absent = {**_ABSENT, "suffix": (None, "")}

    prompt: Annotated[list[Prompt], PROMPT_SCHEMA]
    max_tokens: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: object) -> list[Prompt]:
        return prompt_list(value)

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.best_of not in (None, self.sequences):
            raise BadRequest(
                f"best_of ({self.best_of}) is only supported where it equals n ({self.sequences})",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise BadRequest(
                "'max_tokens' must be at least 1, or 0 with 'echo' or 'prompt_logprobs'",
                param="max_tokens",
                code="invalid_value",
            )
        return self

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_scores(self) -> int:
        echoed = self.num_logprobs if self.echo else -1
        return max(echoed, super().num_scores)


class ChatBody(OpenAIBody):
    absent = {
        **_ABSENT,
        "add_special_tokens": (None, False),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None, "none"),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _agreeing(self) -> Self:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise BadRequest(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Those that the prompt tells of: none where none may be called."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1
