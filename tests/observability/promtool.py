"""Prometheus' tools and the rules in configs/, for the tests of both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_cluster.config import config_dir

PROMETHEUS = config_dir() / "prometheus"
RULES = PROMETHEUS / "rules"

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (Debian: apt-get install prometheus)",
)


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of `alerts` or `recording`."""
    groups = yaml.safe_load((RULES / f"{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
