"""The defaults that a model's generation_config.json sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ModelError
from pd_cluster.model.generation import default_sampling
from pd_cluster.types import SamplingParams


def defaults(folder: Path, **settings: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return default_sampling(folder)


def test_fields_of_sampling_params(tmp_path: Path) -> None:
    found = defaults(
        tmp_path,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0,
        repetition_penalty=1.05,
        do_sample=True,
        eos_token_id=[1, 2],
        max_new_tokens=5,
        transformers_version="5",
    )
    assert found == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    assert type(found["top_k"]) is int
    assert SamplingParams(max_tokens=1, **found).top_k == 20


def test_what_is_not_set_is_no_default(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}
    assert defaults(tmp_path, temperature=None, top_k=-1) == {"top_k": 0}


@pytest.mark.parametrize(
    ("key", "value", "range_"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", True, "0 or more"),
        ("top_p", 0, "above 0, at most 1"),
        ("top_p", 1.1, "above 0, at most 1"),
        ("top_k", 2.5, "a whole number"),
        ("top_k", -2, "a whole number"),
        ("min_p", "low", "from 0 to 1, found 'low'"),
        ("repetition_penalty", 0, "above 0"),
    ],
)
def test_values_out_of_range(tmp_path: Path, key: str, value: Any, range_: str) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} must be {range_}"):
        defaults(tmp_path, **{key: value})
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected an object"):
        default_sampling(tmp_path)
