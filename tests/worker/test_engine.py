"""Which device a worker computes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_cluster.config import Config
from pd_cluster.errors import StartError
from pd_cluster.worker import engine
from pd_cluster.worker.engine import Engine, pick_device
from tests.model.tiny import save_tiny


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, chosen in ((True, torch.device("cuda", 0)), (False, torch.device("cpu"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert pick_device("auto") == chosen
        assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(StartError, match="torch sees no GPU"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("cuda") == torch.device("cuda", 0)


def test_a_pool_that_does_not_fit_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    config = Config(device="cpu", max_total_tokens=64)
    assert Engine.load(tmp_path, config).layout.mem_type == "DRAM"
    made = []

    def make_layout(*args: object) -> object:
        made.append(args[-1])
        raise torch.OutOfMemoryError("no room for the pool")

    monkeypatch.setattr(engine, "make_layout", make_layout)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    with pytest.raises(StartError, match=r"64 tokens of KV .* do not fit into stand-in"):
        Engine.load(tmp_path, config)
    assert made == [torch.device("cpu")]
