"""Compiling the sources in `csrc` into one shared library, once per machine and version.

The library is plain C (no torch or Python ABI), so it compiles in seconds. It is linked against the
OpenMP runtime that torch has loaded: with another one, two thread pools would fight for the cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pd_kernels.registry import BackendUnavailable

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",
)


def build() -> Path:
    """The path of the compiled library, from the user's cache or built now.

    Safe in several processes at once: one compiles, the others wait for it. Raises
    `BackendUnavailable` without a compiler, sources or torch's OpenMP runtime.
    """
    compiler, sources, openmp = _compiler(), _source_dir(), _openmp_runtime()
    folder = _cache_root() / _fingerprint(compiler, sources, openmp)
    library = folder / "libpd_kernels.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
            if not library.exists():
                _compile(compiler, sources, openmp, library)
    except OSError as error:
        raise BackendUnavailable(f"cannot build in {folder}: {error}") from error
    return library


def _compile(compiler: str, sources: Path, openmp: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def compile_one(source: Path) -> str:
            target = os.path.join(scratch, source.stem + ".o")
            _run([compiler, *_FLAGS, "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sorted(sources.glob("*.cpp"))))
        # Without -fopenmp here, or the linker would add the compiler's own OpenMP runtime.
        linked = os.path.join(scratch, library.name)
        _run([compiler, "-shared", *objects, str(openmp), "-o", linked])
        os.replace(linked, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BackendUnavailable("there is no C++ compiler (c++, g++, clang++ or $CXX)")


def _source_dir() -> Path:
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):  # a wheel; an editable install
        if any(folder.glob("*.cpp")):
            return folder
    raise BackendUnavailable(f"the kernels' sources are not beside {package}")


def _openmp_runtime() -> Path:
    """The libgomp in this process: torch's own, should another package have brought one too."""
    mapped = Path("/proc/self/maps")
    lines = mapped.read_text().splitlines() if mapped.exists() else []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "/libgomp" in line}
    site = Path(torch.__file__).resolve().parent.parent
    for path in sorted(paths, key=lambda path: not path.is_relative_to(site / "torch")):
        if path.is_relative_to(site / "torch") or path.parent.name == "torch.libs":
            return path
    if len(paths) == 1:
        return paths.pop()
    raise BackendUnavailable("torch does not use GNU's OpenMP runtime (libgomp) here")


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "pd-cluster" / "kernels"


def _fingerprint(compiler: str, sources: Path, openmp: Path) -> str:
    """Everything that the compiled library depends on, as a name for its folder."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version)
    for part in (compiler, *_FLAGS, openmp.name, torch.__version__, _cpu()):
        digest.update(part.encode() + b"\0")
    for source in sorted((*sources.glob("*.cpp"), *sources.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """The processor's instruction sets: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join([platform.machine(), *sorted(features)])
