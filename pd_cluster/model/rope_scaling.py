"""How a model's rotary frequencies are stretched for contexts longer than it was first trained on.

The kinds are those of transformers' `rope_type` that do not depend on a sequence's length: with
"dynamic" and "longrope" the keys that are cached would have to change as a sequence grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pd_cluster.errors import ModelError

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """`factor` stretches; the rest is of "llama3" only, lengths in tokens."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: float = 8192


def parse_rope(data: Mapping[str, Any], source: str) -> Rope:
    """The rope of a Hugging Face config; `source` names it in errors.

    transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`. Raises
    ModelError for a kind that is not supported and a number that is missing or out of range.
    """
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ModelError(
            f"{source}: rope scaling {kind!r} is not supported; use {', '.join(KINDS)}"
        )
    rotated = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor {rotated} is not supported; use 1.0")

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key, data.get(key, default))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"{source}: {key} must be a number above 0, found {value!r}")
        return float(value)

    theta = number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, number("factor"))
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if not low < high:
        raise ModelError(
            f"{source}: low_freq_factor ({low}) must be below high_freq_factor ({high})"
        )
    original = number("original_max_position_embeddings")
    return Rope(theta, kind, number("factor"), low, high, original)
