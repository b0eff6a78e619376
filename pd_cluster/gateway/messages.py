"""Chat messages and tools, as clients send them and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator
from pydantic_core import from_json

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.protocol import Body, json_type

MAX_PARTS = 1024
MAX_TOOLS = 128

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_PARTS = {"type": "array", "items": _PART, "maxItems": MAX_PARTS}
_CONTENT_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]})


def _choice(value: object) -> object:
    if value in (None, "none", "auto"):
        return value
    raise BadRequest(
        '\'tool_choice\' may be "none" or "auto": calls are neither enforced nor parsed here',
        param="tool_choice",
        code="unsupported_parameter",
    )


# Calls stay in the answer's text, in the model's own notation.
ToolChoice = Annotated[Literal["none", "auto"] | None, BeforeValidator(_choice)]


class Function(Body):
    absent = {"strict": (None, False)}

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionCall(Body):
    """`arguments` is a JSON object, as text."""

    name: str = Field(min_length=1, max_length=128)
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """Raises BadRequest."""
        try:
            found = from_json(self.arguments or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise _bad_arguments(str(error)) from error
        if not isinstance(found, dict):
            raise _bad_arguments(f"expected an object, not {json_type(found)}")
        return found


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message; fields that an answer carries as null may be sent back as they are."""

    absent = {
        "refusal": (None,),
        "function_call": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "reasoning_content": (None,),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    content: Annotated[str | None, _CONTENT_SCHEMA] = Field(None, validate_default=True)

    @field_validator("tool_calls", "tool_call_id")
    @classmethod
    def _of_role(cls, value: Any, info: Any) -> Any:
        role = "assistant" if info.field_name == "tool_calls" else "tool"
        if value and info.data.get("role") != role:
            raise ValueError(f"only messages of role {role!r} have it")
        return value

    @field_validator("content", mode="plain")
    @classmethod
    def _text(cls, value: object, info: Any) -> str | None:
        if isinstance(value, str) or (value is None and info.data.get("tool_calls")):
            return value
        if not isinstance(value, list):
            raise ValueError(f"must be a string or a list of text parts, not {json_type(value)}")
        if len(value) > MAX_PARTS:
            raise ValueError(f"at most {MAX_PARTS} parts in one message, not {len(value)}")
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"part {index}: only parts of type 'text' are supported")
            if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
                raise ValueError(f"part {index}: a text part has 'type' and the string 'text' only")
        return "".join(part["text"] for part in value)

    @property
    def needs_tools(self) -> bool:
        """Whether only a template that knows tools can tell the model of it."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def rendered(self) -> dict[str, Any]:
        """For a chat template, which takes arguments as objects. Raises BadRequest."""
        shown: dict[str, Any] = {
            # Models know the role by its older name.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            shown["name"] = self.name
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.parsed},
                    **({} if call.id is None else {"id": call.id}),
                }
                for call in self.tool_calls
            ]
        return shown


def needs_tools(messages: Sequence[ChatMessage]) -> bool:
    return any(message.needs_tools for message in messages)


def check_number(messages: Sequence[ChatMessage], most: int) -> None:
    """Raises BadRequest."""
    if len(messages) > most:
        raise BadRequest(
            f"messages: {len(messages)}, at most {most} (max_messages)",
            param="messages",
            code="too_many_messages",
        )


def _bad_arguments(why: str) -> BadRequest:
    return BadRequest(f"'arguments' of a tool call are not a JSON object: {why}", param="messages")
