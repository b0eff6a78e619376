"""Fixtures that several parts' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pd_cluster.model.store import resolve_model

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which transformers does too.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder in the user's cache; fetched where it is not there yet."""
    return resolve_model("smollm2", progress=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A real cluster on a busy machine takes its time; nothing waits for ever all the same."""
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
