"""docs/configuration.md lists every key as pd_cluster/config.py has it.

`python -m tests.test_configuration_page` writes the tables anew.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pd_cluster.cli.options import KEYS
from pd_cluster.config import Config

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
MARK = "<!-- keys -->\n"
# Options that are no key by the same name.
OPTIONS = {"api_keys": "--api-key", "model_aliases": "--served-model-name, again"}


def table() -> str:
    options = {key for keys in KEYS.values() for key in keys}
    rows = ["| key | option | default | what |", "|---|---|---|---|", *rows_of(Config, "", options)]
    return "\n".join(rows) + "\n"


def rows_of(section: type[BaseModel], prefix: str, options: set[str]) -> list[str]:
    rows = []
    for key, field in section.model_fields.items():
        inner = model_of(field.annotation)
        if inner is not None and key != "kv_events_config":
            rows += rows_of(inner, f"{prefix}{key}.", set())
            continue
        option = OPTIONS.get(key) or (f"--{key.replace('_', '-')}" if key in options else "")
        default = field.get_default(call_default_factory=True)
        what = field.description or ""
        if choices := choices_of(field.annotation):
            what += f" ({', '.join(choices)})"
        shown = [f"`{prefix}{key}`", f"`{option}`" if option else "", value(default), what]
        rows.append("| " + " | ".join(shown) + " |")
    return rows


def value(default: Any) -> str:
    if default is None or default in ((), {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def model_of(annotation: Any) -> type[BaseModel] | None:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    models = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
    return models[0] if models else None


def choices_of(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        return choices_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str(each) for each in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        found = [choices_of(each) for each in get_args(annotation) if each is not NoneType]
        return [each for choices in found for each in choices]
    return []


def test_the_page_has_every_key() -> None:
    _, written, _ = PAGE.read_text().split(MARK)
    assert written.strip() == table().strip(), __doc__


if __name__ == "__main__":
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}{table()}{MARK}{after}")
