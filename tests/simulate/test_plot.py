"""The picture of runs, and what is said where none can be drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.simulate.command import Options, simulate

OPTIONS = Options(num_conversations=2, page_size=16, pages=2000, prefill=1, decode=1)


def test_runs_become_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert simulate(replace(OPTIONS, compare="cost,random", plot=path)) == 0
    text = path.read_text()
    # Text stands beside its outlines as a comment.
    assert all(f"<!-- {name} -->" in text for name in ("cost", "random", "time to first token"))
    path = tmp_path / "out.png"
    assert simulate(replace(OPTIONS, plot=path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, message in (("out.xyz", "unknown kind"), ("none/out.png", "no such folder")):
        with pytest.raises(ConfigError, match=message):
            simulate(replace(OPTIONS, plot=tmp_path / name))
    with pytest.raises(ConfigError, match="--plot draws one run, .* not --plan"):
        simulate(replace(OPTIONS, plot=tmp_path / "out.png", plan=True))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pd-cluster\[plot\]'"):
        simulate(replace(OPTIONS, plot=tmp_path / "out.png"))
