"""The bodies of requests, as clients send them.

Strict: a wrong type, an unknown field or a value out of range is a 400 that names the field.
Fields that the APIs know and we do not have yet are taken with a value that asks for nothing, and
are a 400 with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pd_cluster.errors import BadRequest

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 256

Prompt = str | list[int]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

_Neutral = Mapping[str, tuple[Any, ...]]
_OPENAI_ABSENT: _Neutral = {
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


class Body(BaseModel):
    """A JSON object. `absent` maps fields that are not there yet to the values that ask for
    nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    absent: ClassVar[_Neutral] = {}

    @classmethod
    def parse(cls, data: object) -> Self:
        """Raises BadRequest naming the field."""
        if not isinstance(data, dict):
            raise BadRequest(f"the body must be a JSON object, not {_json_type(data)}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _bad_request(error) from error

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls.absent.keys().isdisjoint(data):
            return data
        for field, neutral in cls.absent.items():
            if field in data and not any(_same(data[field], each) for each in neutral):
                raise BadRequest(
                    f"{field!r} is not supported yet", param=field, code="unsupported_parameter"
                )
        return {key: value for key, value in data.items() if key not in cls.absent}


class Sampling(Body):
    """What all ways to ask share; None means the default."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: Seed | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: object) -> object:
        if value is None:
            return []
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list) and "" in stops:
            raise ValueError("a stop string must not be empty")
        return stops


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
        **_OPENAI_ABSENT,
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
            raise ValueError(f"must be a string or a list of text parts, not {_json_type(value)}")
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"part {index}: only parts of type 'text' are supported")
            if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
                raise ValueError(f"part {index}: a text part has 'type' and the string 'text' only")
        return "".join(part["text"] for part in value)


class ChatBody(OpenAIBody):
    absent = {
        **_OPENAI_ABSENT,
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


class NativeSampling(Sampling):
    absent = {
        "n": (None, 1),
        "min_new_tokens": (None, 0),
        "min_p": (None, 0),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "logit_bias": (None, {}),
        "json_schema": (None,),
        "regex": (None,),
        "ebnf": (None,),
        "stop_regex": (None, []),
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "no_stop_trim": (None, False),
    }

    max_new_tokens: int | None = Field(None, ge=1)
    sampling_seed: Seed | None = None


class NativeBody(Body):
    """SGLang's /generate: exactly one of `text` and `input_ids`, single or a list. `rid` is only a
    name.
    """

    absent = {
        "return_logprob": (None, False),
        "return_hidden_states": (None, False),
        "return_text_in_logprobs": (None, False),
        "logprob_start_len": (None, -1),
        "top_logprobs_num": (None, 0),
        "image_data": (None,),
        "input_embeds": (None,),
        "lora_path": (None,),
        "session_params": (None,),
        "priority": (None, 0),
    }

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool = False
    rid: str | list[str] | None = None
    extra_key: str | None = Field(None, min_length=1, max_length=256)

    @field_validator("text", "input_ids", mode="plain")
    @classmethod
    def _typed_prompts(cls, value: Any, info: Any) -> Any:
        kind = str if info.field_name == "text" else list
        if value is not None and not all(isinstance(each, kind) for each in prompt_list(value)):
            wanted = "a string or a list of strings" if kind is str else "a list of token ids"
            raise ValueError(f"must be {wanted}")
        return value

    @field_validator("sampling_params", mode="before")
    @classmethod
    def _default_sampling(cls, value: object) -> object:
        return NativeSampling() if value is None else value

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give exactly one of 'text' and 'input_ids'", param="text")
        names = self.rid if isinstance(self.rid, list) else [self.rid]
        if self.rid is not None and (
            isinstance(self.rid, list) != self.is_batch or len(names) != len(self.prompts)
        ):
            raise BadRequest("'rid' must be one string for each prompt", param="rid")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return prompt_list(self.text if self.text is not None else self.input_ids)

    @property
    def is_batch(self) -> bool:
        """A list of prompts, be it of one, is answered by a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        assert self.input_ids is not None
        return isinstance(self.input_ids[0], list)


def prompt_list(value: object) -> list[Prompt]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            f"must be a string, a list of token ids or a list of either, not {_json_type(value)}"
        )
    if not value:
        raise ValueError("must not be empty")
    if all(type(each) is int for each in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, not {len(value)}")
    for index, each in enumerate(value):
        if isinstance(each, str):
            continue
        if not isinstance(each, list) or not all(type(token) is int for token in each):
            raise ValueError(f"element {index} is neither a string nor a list of token ids")
    return list(value)


def _bad_request(error: ValidationError) -> BadRequest:
    """The first thing that is wrong, as a sentence that names the field."""
    first = error.errors(include_url=False, include_input=True)[0]
    param = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            return BadRequest(f"unknown field {param!r}", param=param, code="unknown_parameter")
        case "missing":
            return BadRequest(f"field {param!r} is required", param=param, code="missing_parameter")
        case _:
            message = first["msg"].removeprefix("Value error, ")
            shown = repr(first["input"])
            got = f" (got {shown})" if len(shown) <= 80 else ""
            return BadRequest(f"{param}: {message}{got}", param=param, code="invalid_value")


def _same(value: object, neutral: object) -> bool:
    """Equality in JSON's sense: true is not 1, but 1.0 is 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
