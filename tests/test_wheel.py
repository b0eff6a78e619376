"""What is built from the checkout: one wheel with all that serving needs, and nothing more."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.cli.serving import PATIENCE_S, serving

ROOT = Path(__file__).parent.parent
SOURCES = ("LICENSE", "README.md", "configs", "kernels", "pd_cluster", "pyproject.toml", "transfer")


def has_setuptools() -> bool:
    """One that pyproject.toml accepts; else pip fetches it."""
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, ignore=junk)
        else:
            shutil.copy(source, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder / "dist"), str(copy)]
    if has_setuptools():
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = wheel.parent.parent / "source"
    folders = {
        "pd_cluster": source / "pd_cluster",
        "pd_cluster/configs": source / "configs",
        "pd_kernels": source / "kernels" / "pd_kernels",
        "pd_kernels/csrc": source / "kernels" / "csrc",
        "pd_transfer": source / "transfer" / "pd_transfer",
    }
    wanted = {
        f"{prefix}/{path.relative_to(folder)}"
        for prefix, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"pd_cluster/py.typed", "pd_kernels/py.typed", "pd_transfer/py.typed"} <= wanted
    assert {"pd_cluster/configs/local.yaml", "pd_kernels/csrc/page_write.cpp"} <= wanted
    assert wanted - names == set()


def test_the_wheel_takes_no_name_of_another_distribution(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        (scripts,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "pd-cluster = pd_cluster.cli:main" in archive.read(scripts).decode()
    packages = {name for name in tops if not name.endswith(".dist-info")}
    assert packages == {"pd_cluster", "pd_kernels", "pd_transfer"}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_an_installed_wheel_serves(wheel: Path, smollm2: Path, tmp_path: Path) -> None:
    """In an environment with nothing else, away from the checkout, kernels compiled anew."""
    venv, empty, cache = tmp_path / "venv", tmp_path / "empty", tmp_path / "cache"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    install += ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True)
    command = [str(venv / "bin" / "pd-cluster"), "serve", "--cluster-name", "from-a-wheel"]
    model = ["--model", str(smollm2), "--served-model-name", "smollm2"]
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": ""}
    with serving([*command, *model], empty, **environment) as server:
        suggested = server.wait_until_ready()
        answered = subprocess.run(
            suggested, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        answer = json.loads(answered.stdout)
        assert "Paris" in answer["choices"][0]["message"]["content"]
        down = [str(venv / "bin" / "pd-cluster"), "down", "--cluster-name", "from-a-wheel"]
        subprocess.run(down, env=server.environment, timeout=PATIENCE_S, check=True)
        assert server.process.wait(PATIENCE_S) == 0, server.log
        assert list(empty.iterdir()) == []
