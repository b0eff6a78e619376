"""KV pools by --max-total-tokens and --mem-fraction-static: the choice, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import nodes
from pd_cluster.config import Config, load_config, validate_config
from pd_cluster.errors import ConfigError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.config import load_config as load_model
from pd_cluster.nodes import available_memory, hosts_for
from pd_cluster.pools import Host, KvPool, bytes_per_token, choose_pool, weights_bytes
from tests.model.tiny import save_tiny

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return load_model(folder)


def choose(model: ModelConfig, hosts: list[Host], **settings: Any) -> KvPool:
    return choose_pool(validate_config(settings), model, hosts)


def test_the_weights_are_counted_as_they_lie_in_memory(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    sizes = weights_bytes(Config(), load_model(tmp_path))
    assert sizes <= file.stat().st_size < sizes + 8192  # the file has a header
    save_tiny(tmp_path, tie_word_embeddings=True)
    tied, vocab, hidden = load_model(tmp_path), 97, 64
    assert weights_bytes(Config(), tied) == sizes - vocab * hidden * 4
    # Packed for bfloat16, the head is no view of the embedding.
    assert weights_bytes(validate_config({"dtype": "bfloat16"}), tied) == sizes // 2


def test_tokens_are_the_default(model: ModelConfig) -> None:
    per_token = bytes_per_token(Config(), model)
    assert per_token == 2 * 3 * 2 * 16 * 4
    assert choose(model, []) == KvPool(
        tokens=32768, pages=32768, bytes=32768 * per_token, source="max_total_tokens"
    )


def test_a_fraction_of_the_host_is_divided_among_its_workers(model: ModelConfig) -> None:
    hosts = [Host("this machine", 40 * MIB, 4)]
    weights, per_token = weights_bytes(Config(), model), bytes_per_token(Config(), model)
    pool = choose(model, hosts, mem_fraction_static=0.5, page_size=16)
    assert pool.tokens == (5 * MIB - weights) // per_token // 16 * 16
    assert (pool.pages, pool.bytes) == (pool.tokens // 16, pool.tokens * per_token)
    assert pool.bytes + weights <= 5 * MIB < pool.bytes + weights + 16 * per_token
    assert "0.5 of 40.00 MiB available memory on this machine, for 4 workers" in pool.source
    halved = choose(model, hosts, mem_fraction_static=0.5, page_size=16, dtype="bfloat16")
    assert halved.tokens > 2 * pool.tokens


def test_the_poorest_host_decides(model: ModelConfig) -> None:
    hosts = [Host("a", 100 * MIB, 1), Host("b", 150 * MIB, 3), Host("c", 60 * MIB, 1)]
    alone = choose(model, [hosts[1]], mem_fraction_static=0.9)
    assert choose(model, hosts, mem_fraction_static=0.9) == alone
    assert "on b, for 3 workers" in alone.source


def test_tokens_bound_what_the_fraction_gives(model: ModelConfig) -> None:
    hosts = [Host("this machine", 40 * MIB, 1)]
    free = choose(model, hosts, mem_fraction_static=0.5)
    bounded = choose(model, hosts, mem_fraction_static=0.5, max_total_tokens=1000)
    assert (bounded.tokens, bounded.source) == (
        1000,
        f"max_total_tokens; mem_fraction_static has room for {free.tokens}",
    )
    larger = choose(model, hosts, mem_fraction_static=0.5, max_total_tokens=free.tokens + 1)
    assert larger == free
    # The embedded default does not bound it.
    config = load_config(settings=["mem_fraction_static=0.9"])
    assert choose_pool(config, model, [Host("a", 2**30, 1)]).tokens > config.max_total_tokens


def test_what_does_not_fit_is_an_error_with_the_numbers(model: ModelConfig) -> None:
    hosts = [Host("10.0.0.4", 2 * MIB, 2)]
    with pytest.raises(ConfigError) as error:
        choose(model, hosts, mem_fraction_static=0.1)
    for part in (
        "'mem_fraction_static'",
        "0.1 of",
        "10.0.0.4",
        "2 workers",
        "weights",
        "0.10 MiB",
        "768",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="no node that may have workers"):
        choose(model, [], mem_fraction_static=0.1)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5, "much"])
def test_the_fraction_lies_between_0_and_1(fraction: object) -> None:
    with pytest.raises(ConfigError, match="'mem_fraction_static'"):
        validate_config({"mem_fraction_static": fraction})


def test_all_workers_are_on_the_one_machine() -> None:
    (host,) = hosts_for(validate_config({"prefill": 2, "decode": 3}), local=True)
    assert (host.name, host.workers) == ("this machine", 5)
    assert 0 < host.memory


def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_CGROUP", tmp_path)
    whole = available_memory()
    for name, text in (
        ("memory.max", "3000000\n"),
        ("memory.current", "1000000\n"),
        ("memory.stat", "anon 5\ninactive_file 200000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available_memory() == 2_200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > whole // 2


def test_who_shares_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "H100"
        total_memory = 80 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)

    def sharing(**settings: Any) -> int:
        [host] = hosts_for(Config(decode=3, **settings), local=True)
        assert host == Host("this machine", 80 * 10**9, host.workers, "memory of H100")
        return host.workers

    assert sharing(device="cuda") == 1  # each asks Ray for a whole one
    half = {"prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}}
    assert sharing(device="cuda", resources=half) == 2
    assert sharing(device="auto", resources=half) == 2
    assert sharing(device="auto") == 4  # all see all of them, and take the first
    [host] = hosts_for(Config(device="cpu"), local=True)
    assert (host.workers, host.of) == (2, "available memory")
