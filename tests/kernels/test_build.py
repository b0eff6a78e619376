from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pd_kernels
from pd_kernels.build import build
from pd_kernels.registry import BackendUnavailable, Op

_SAY = "import logging; logging.basicConfig(); import pd_kernels; print(pd_kernels.backend_name())"
_USE = """
import torch, pd_kernels
x = torch.ones(2, 64)
print(pd_kernels.rms_norm(x, torch.ones(64), 0.0).sum().item(), pd_kernels.backend_name())
"""
# A process of its own: here, transformers may have brought other OpenMP runtimes.
_MAPPED = """
import pd_kernels
pd_kernels.warm_up()
paths = {line.split()[-1] for line in open("/proc/self/maps")}
print(*(path for path in paths if "/libgomp" in path or "libpd_kernels" in path))
"""


def python(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(tmp_path: Path) -> None:
    out, log = python(_SAY, tmp_path, PATH="", CXX="").communicate(timeout=120)
    assert out.strip() == "torch"
    assert log.count("\n") == 1
    assert "no C++ compiler" in log
    assert "plain torch" in log


def test_a_compiler_that_fails_leaves_the_reference_and_no_library(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    broken.chmod(0o755)
    out, log = python(_SAY, tmp_path, CXX=str(broken)).communicate(timeout=120)
    assert out.strip() == "torch"
    assert "no luck" in log
    assert not list(tmp_path.rglob("*.so"))


def test_an_unwritable_cache_leaves_the_reference(tmp_path: Path) -> None:
    (tmp_path / "pd-cluster").write_text("a file where the folder should be")
    out, log = python(_SAY, tmp_path).communicate(timeout=120)
    assert out.strip() == "torch"
    assert "cannot build in" in log


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    require_compiled()
    # Counts links: the command that makes the library has -shared.
    wrapper = tmp_path / "counting-c++"
    links = tmp_path / "links"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -shared "*) echo link >> "{links}";; esac\n'
        'exec "$REAL_CXX" "$@"\n'
    )
    wrapper.chmod(0o755)
    compiler = os.environ.get("CXX") or "c++"
    cache = tmp_path / "cache"
    together = [
        python(_USE, cache, CXX=str(wrapper), REAL_CXX=compiler, OMP_NUM_THREADS="1")
        for _ in range(3)
    ]
    results = [process.communicate(timeout=240) for process in together]
    assert [out.split() for out, _ in results] == [["128.0", "cpu"]] * 3, results
    assert links.read_text().count("link") == 1
    assert len(list(cache.rglob("*.so"))) == 1


def test_a_library_that_is_there_is_used_without_compiling() -> None:
    require_compiled()
    library = build()
    before = library.stat().st_mtime_ns
    assert build() == library
    assert library.stat().st_mtime_ns == before


def test_the_library_shares_torchs_openmp() -> None:
    require_compiled()
    out, _ = python(_MAPPED, build().parents[2].parent).communicate(timeout=120)
    mapped = out.split()
    assert len(mapped) == 2, mapped
    assert sum("libpd_kernels" in path for path in mapped) == 1


def test_warm_up_names_the_backend() -> None:
    assert pd_kernels.warm_up().startswith(f"{pd_kernels.backend_name('cpu')} kernels")
    assert pd_kernels.backend_name("meta") == "torch"


def test_ops_fall_back_to_their_reference_one_by_one() -> None:
    def unavailable() -> None:
        raise BackendUnavailable("not here")

    def reference() -> int:
        return 1

    op = Op("op", reference, {"cpu": unavailable})  # type: ignore[dict-item]
    assert op.on("cpu") is reference
    assert op.backend("cpu") == "torch"
    better = Op("op", reference, {"cpu": lambda: lambda: 2})
    assert better.on("cpu")() == 2
    assert better.backend("cpu") == "cpu"
    assert better.on("cuda") is reference


def require_compiled() -> None:
    if pd_kernels.backend_name("cpu") != "cpu":
        pytest.skip("there is no compiled backend on this machine")
