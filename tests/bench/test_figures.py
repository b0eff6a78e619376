"""The benches' published names, what they conclude, and how they are written; never their times."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pd_cluster.bench import layout, prefix, runner
from pd_cluster.bench.runner import BenchName
from pd_cluster.errors import ConfigError, StartError

DOCS = Path(__file__).parent.parent.parent / "docs" / "performance.md"


def test_transfer_figures_stand_beside_memcpy() -> None:
    named = runner.name_transfer(
        {
            "write.contiguous.262144.ours_gbps": 6.0,
            "write.contiguous.262144.memcpy_gbps": 8.0,
            "write.scattered.262144.ours_gbps": 2.0,
            "write.scattered.262144.memcpy_gbps": 4.0,
            "write.scattered.384.ours_gbps": 1.0,
            "write.scattered.384.memcpy_gbps": 2.0,
            "roundtrip_us": 90.0,
        }
    )
    assert named["transfer.write.contiguous.262144.ours_gbps"] == 6.0
    assert named["transfer.write.contiguous.262144.ratio"] == 0.75
    assert named["transfer.write.scattered.262144.ratio"] == 0.5
    assert named["transfer.write.scattered.384.ratio"] == 0.5
    assert named["transfer.roundtrip_us"] == 90.0
    sizes = [name for name in named if name.endswith("ratio") and "scattered" in name]
    assert [name.split(".")[3] for name in sizes] == ["384", "262144"]


def test_kernel_figures_stand_beside_torch() -> None:
    named = runner.name_kernels({"rope.n8.ours": 5.0, "rope.n8.torch": 50.0})
    assert named == {
        "kernels.rope.n8.ours_us": 5.0,
        "kernels.rope.n8.torch_us": 50.0,
        "kernels.rope.n8.ratio": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("cache.match.1024_us", "us"),
        ("cache.match.1024_ratio", "ratio"),
        ("cache.leaf_of_100_tokens_bytes", "bytes"),
        ("prefix.ttft_first_s", "s"),
        ("prefix.bytes_first", "bytes"),
        ("prefix.avoided_bytes_second", "bytes"),
        ("transfer.write.scattered.384.ours_gbps", "GB/s"),
        ("transfer.write.scattered.384.ratio", "ratio"),
        ("layout.ratio.16.page_write.8", "ratio"),
    ],
)
def test_names_tell_units(name: str, unit: str) -> None:
    assert runner.unit_of(name) == unit


def test_report_shows_every_name_whole() -> None:
    figures = {f"kernels.{'a_long_case.' * 6}ours_us": 1234.5678, "prefix.bytes_first": 70594560.0}
    out = io.StringIO()
    runner.report(BenchName.CACHE, figures, Console(file=out, width=120))
    text = out.getvalue()
    assert all(name in text for name in figures)
    assert "1,234.6" in text
    assert "70,594,560" in text


def test_json_is_one_flat_object(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    runner.check_writable(path)
    runner.write_json(path, {"a.b_us": 1.5})
    assert json.loads(path.read_text()) == {"a.b_us": 1.5}
    runner.check_writable(path)


@pytest.mark.parametrize("name", ["", "none/figures.json"])
def test_json_that_cannot_be_written_is_told_before(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--json .*cannot be written"):
        runner.check_writable(tmp_path / name)


def test_only_prefix_asks_a_server() -> None:
    with pytest.raises(ConfigError, match="bench cache asks no server"):
        runner.run(BenchName.CACHE, "http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "nonsense"])
def test_prefix_without_a_server(url: str) -> None:
    with pytest.raises(StartError, match=url):
        prefix.run(url)


def test_prefix_concludes_from_its_figures() -> None:
    figures = {"prefix.bytes_first": 1000.0, "prefix.bytes_second": 20.0}
    (line,) = prefix.conclusions({"prefix.ttft_ratio": 0.1, **figures})
    assert "0.100 of the time (as aimed for" in line
    assert "2.0% of the bytes" in line
    (line,) = prefix.conclusions({"prefix.ttft_ratio": 0.3, **figures})
    assert "above the aim" in line


# --- layout ---


SMALL = layout.Sizes(layers=2, contexts=(64, 64), chunk=32, answer=8)


def test_layout_measures_every_case_by_both_layouts() -> None:
    """Also moves pages to another process, whose end would raise."""
    figures = layout.run(SMALL, seconds_each=0)
    cases = {
        "decode_attention.1_of_64",
        "decode_attention.8_of_64",
        "prefill_attention.32_of_32",
        "prefill_attention.32_of_64",
        "page_write.32",
        "page_write.8",
        "transfer.scattered_64",
        "transfer.contiguous_64",
        "request",
    }
    expected = set()
    for size in (1, 16):
        for case in cases:
            times = [f"layout.{name}.{size}.{case}_us" for name in layout.LAYOUTS]
            page, layer = (figures[name] for name in times)
            assert figures[f"layout.ratio.{size}.{case}"] == page / layer
            expected |= {*times, f"layout.ratio.{size}.{case}"}
    assert figures.keys() == expected
    assert len(layout.conclusions(figures)) >= 4


def layout_figures(ratios: dict[str, float]) -> dict[str, float]:
    cases = dict.fromkeys(SMALL.request(), 1.0) | ratios
    return {
        f"layout.ratio.{size}.{case}": ratio
        for size in layout.PAGE_SIZES
        for case, ratio in cases.items()
    }


def test_layout_concludes_from_its_figures() -> None:
    first = layout.conclusions(
        layout_figures({"transfer.scattered_1024": 0.25, "page_write.8": 2.0, "request": 0.5})
    )
    assert "page size 1, page-first is faster: transfer.scattered_1024 (4.0x)" in first
    assert "page size 1, layer-first is faster: page_write.8 (2.0x)" in first
    assert "page size 1, a whole request: page-first takes less, by 2.00x" in first
    other = layout.conclusions(layout_figures({"request": 1.5}))
    assert "page size 16, a whole request: layer-first takes less, by 1.50x" in other
    assert not any("is faster" in line for line in other)


def test_documented_names_are_those_of_the_benches() -> None:
    text = DOCS.read_text()
    for name in BenchName:
        assert f"pd-cluster bench {name}" in text
