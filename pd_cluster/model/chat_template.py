"""Chat templates in Jinja, as Hugging Face models carry them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pd_cluster.errors import BadRequest, ModelError


class ChatTemplate:
    """A model's chat template; `text` None: the model has none. ModelError when it is no Jinja.

    `knows_tools`: what `tools` are there has a place in it.
    """

    def __init__(self, text: str | None, source: str) -> None:
        self._template = None
        self.knows_tools = False
        if text is not None:
            try:
                environment = _environment()
                self._template = environment.from_string(text)
                # The name by which transformers hands them to templates.
                names = find_undeclared_variables(environment.parse(text))
                self.knows_tools = "tools" in names
            except jinja2.TemplateError as error:
                raise ModelError(f"{source}: chat template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text. Raises BadRequest with the template's reason."""
        if self._template is None:
            raise BadRequest("this model has no chat template", param="messages")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                # Templates ask whether there are any.
                tools=list(tools) or None,
                **special_tokens,
            )
        # A template meets what clients send: a wrong type shows as one of Python's own errors.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise BadRequest(f"chat template: {error}", param="messages") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        text: str = caller()
        return text


def _environment() -> jinja2.Environment:
    """The names and settings that templates are written for; sandboxed: models bring them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    """Without the escapes for HTML that Jinja's own filter puts in."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
