"""How a model's authors would have it sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError
from pd_cluster.model.json_file import read_json

# Names of generation_config.json that are SamplingParams' too: what each may be.
_ALLOWED: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda value: value >= 0),
    "top_p": ("above 0, at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number, -1 or more", lambda value: value >= -1 and value == int(value)),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: value > 0),
}


def default_sampling(folder: Path) -> dict[str, Any]:
    """Fields of SamplingParams that `folder`'s generation_config.json sets; {} where it has none.

    Those that vLLM and SGLang take: they apply where a request says nothing. Raises ModelError for
    a value out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    data = read_json(path)
    return {key: _value(data[key], key, path) for key in _ALLOWED if data.get(key) is not None}


def _value(value: Any, key: str, path: Path) -> float | int:
    range_, allowed = _ALLOWED[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not allowed(value):
        raise ModelError(f"{path}: {key} must be {range_}, found {value!r}")
    # -1 is another way to say that nothing is cut off.
    return max(0, int(value)) if key == "top_k" else float(value)
