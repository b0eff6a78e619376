"""What the parts of the check report, and the table and JSON made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "FAILED", "skipped", "measured"]


@dataclass(frozen=True)
class Result:
    """`name` is dotted, as in the JSON; `value` is a figure's, `detail` says why or how far off."""

    name: str
    status: Status
    value: float | None = None
    detail: str = ""


Report = Callable[[Result], None]


def table(results: list[Result]) -> str:
    width = max(len(each.name) for each in results)
    lines = []
    for each in results:
        value = "" if each.value is None else f"{each.value:12.4g}"
        lines.append(f"{each.name:{width}}  {each.status:8}  {value:12}  {each.detail}".rstrip())
    return "\n".join(lines)


def figures(results: list[Result]) -> dict[str, float | bool | str]:
    """One flat object: checks are true or false, skipped ones tell why under `skipped.`."""
    flat: dict[str, float | bool | str] = {}
    for each in results:
        if each.status == "measured" and each.value is not None:
            flat[f"gpu.{each.name}"] = each.value
        elif each.status == "skipped":
            flat[f"gpu.skipped.{each.name}"] = each.detail
        else:
            flat[f"gpu.check.{each.name}"] = each.status == "ok"
    return flat
