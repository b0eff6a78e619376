"""What a real engine says of itself, and what the coordinator makes of one that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cluster.config import Config, validate_config
from pd_cluster.coordinator.state import CoordinatorState
from pd_cluster.worker.engine import Engine
from tests.coordinator.test_state import report
from tests.model.tiny import save_tiny

SETTINGS = {"page_size": 1, "max_total_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def signature(folder: Path) -> dict[str, str]:
    return Engine.load(folder, validate_config(SETTINGS)).signature("tiny")


@pytest.mark.parametrize(
    ("settings", "shape", "model", "named"),
    [
        ({"page_size": 4}, {}, "tiny", "page_size is '4' here and '1' there"),
        ({"layout": "layer_first"}, {}, "tiny", "layout is 'layer_first' here"),
        ({"dtype": "bfloat16"}, {}, "tiny", "dtype is 'bfloat16' here and 'float32' there"),
        ({}, {}, "other", "model is 'other' here and 'tiny' there"),
        ({}, {"num_key_value_heads": 4}, "tiny", "num_kv_heads is '4' here and '2' there"),
        ({}, {"num_hidden_layers": 2}, "tiny", "num_layers is '2' here and '3' there"),
        ({"max_total_tokens": 128}, {}, "tiny", None),
    ],
)
def test_workers_that_differ_refuse_each_other(
    folder: Path,
    tmp_path: Path,
    signature: dict[str, str],
    settings: dict[str, Any],
    shape: dict[str, int],
    model: str,
    named: str | None,
) -> None:
    """Case 12: by the name of what differs; a pool of another size is no difference."""
    if shape:
        folder = tmp_path
        save_tiny(folder, **shape)
    engine = Engine.load(folder, validate_config({**SETTINGS, **settings}))
    state = CoordinatorState(Config())
    assert state.report(report("prefill-0", signature=signature), 0.0)[0].error is None
    reply, _ = state.report(report("decode-0", signature=engine.signature(model)), 0.0)
    if named is None:
        assert reply.error is None
    else:
        assert reply.error is not None
        assert named in reply.error
        assert "decode-0" not in state.workers
