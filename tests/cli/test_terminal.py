"""What people read in a terminal of 80 columns: nothing in it is cut."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from pd_cluster import operations
from pd_cluster.cli.options import KEYS
from pd_cluster.config import Config
from tests.cli.conftest import Run


def test_help_names_each_option_whole_and_says_its_default(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("serve", "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for group, keys in KEYS.items():
        assert f"\n{group}:\n" in shown
        for key in keys:
            assert f"\n  --{key.replace('_', '-')} " in shown, key
    words = " ".join(shown.split())
    assert "--hicache-storage-prefetch-policy <text> How long a request waits" in words
    assert "best_effort, wait_complete, timeout) [default: timeout]" in words
    assert "--set <key=value>" in words
    assert "Start a cluster and serve until Ctrl-C" in words


def test_the_list_of_commands_is_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--help").out
    assert "..." not in shown.partition("Commands:")[2]


def test_every_option_says_what_it_does_in_the_words_of_its_key() -> None:
    missing = [name for name, field in Config.model_fields.items() if not field.description]
    assert not missing


def test_status_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(name: str) -> dict[str, Any]:
        pages = ["free", "evictable", "protected", "private", "in_flight"]
        return {
            "worker": {"name": name, "incarnation": "1a2b3c4d"},
            **dict.fromkeys(pages, 131_072),
            **dict.fromkeys(["running", "waiting"], 100),
            "cache_queries": 7,
            "cache_hits": 7,
        }

    status = {"worker": {"name": "prefill-10"}, "state": "draining"}
    info = {
        "model": "smollm2",
        "urls": ["http://127.0.0.1:30000"],
        "workers": [worker("prefill-10"), worker("decode-0")],
        "coordinator": {"workers": [status], "running": 3, "waiting": 1},
    }
    output = io.StringIO()
    Console(file=output, width=80).print(operations.status_table("pd", info))
    shown = output.getvalue()
    assert "…" not in shown
    row = re.search(r"prefill-10@1a2b3c4d +draining +100 +100( +131k){5} +100%", shown)
    assert row is not None, shown
    assert "3 placed, 1 waiting" in shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (9999, "9999"), (10_000, "10k"), (9_999_999, "9999k"), (10**7, "10M")],
)
def test_large_counts_are_short(count: int, shown: str) -> None:
    assert operations.short(count) == shown
