"""The bodies of requests, as clients send them.

Strict: a wrong type, an unknown field or a value out of range is a 400 that names the field.
Fields that the APIs know and we do not have yet are taken with a value that asks for nothing, and
are a 400 with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pd_cluster.errors import BadRequest

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 256
MAX_SEQUENCES = 128
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20

Prompt = str | list[int]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_TOKEN_KEY = r"^(0|[1-9][0-9]{0,9})$"
BiasToken = Annotated[str, Field(pattern=_TOKEN_KEY)]
Namespace = Annotated[str, Field(min_length=1, max_length=256)]
# Higher is sooner.
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
RoutingKey = Annotated[str, Field(min_length=1, max_length=256)]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS}
_ID_LISTS = {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS}
_STOPS = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4}
_BIASES = {
    "type": "object",
    "patternProperties": {_TOKEN_KEY: {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
    "maxProperties": MAX_BIASES,
}
BIAS_SCHEMA = WithJsonSchema({"anyOf": [_BIASES, {"type": "null"}]})
TEXT_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS]})
IDS_SCHEMA = WithJsonSchema({"anyOf": [_IDS, _ID_LISTS]})
PROMPT_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, _ID_LISTS]})
STOP_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _STOPS]})

Neutral = Mapping[str, tuple[Any, ...]]


class Body(BaseModel):
    """A JSON object.

    `absent` maps fields that are not there yet to the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    absent: ClassVar[Neutral] = {}

    @classmethod
    def parse(cls, data: object) -> Self:
        """Raises BadRequest naming the field."""
        if not isinstance(data, dict):
            raise BadRequest(f"the body must be a JSON object, not {json_type(data)}")
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

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With the fields of `absent`, which the generated schema does not know."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        properties = schema.setdefault("properties", {})
        for field, neutral in cls.absent.items():
            properties[field] = {"enum": list(neutral), "description": "Not supported yet."}
        return schema


class Sampling(Body):
    """What all ways to ask share; None means the default."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    # Bounded so that float32 logits stay finite.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[
        dict[BiasToken, Bias] | None, Field(max_length=MAX_BIASES), BIAS_SCHEMA
    ] = None
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    seed: Seed | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS), STOP_SCHEMA] = []
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def sequences(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: object) -> object:
        if value is None:
            return []
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list) and "" in stops:
            raise ValueError("a stop string must not be empty")
        return stops


def prompt_list(value: object) -> list[Prompt]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            f"must be a string, a list of token ids or a list of either, not {json_type(value)}"
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


def json_type(value: object) -> str:
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
