"""What a user can mend is one line that says what is wrong, and exit code 2."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import pd_cluster
from pd_cluster import registry
from tests.cli.conftest import Run
from tests.gateway.conftest import make_tokenizer


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("page_sise: 16", ["'page_sise'", "allowed here", "page_size"]),
        ("page_size: 3", ["'page_size'", "1, 2, 4", "256", "3"]),
        ("timeouts: {prefil_s: 1}", ["'timeouts.prefil_s'", "prefill_s"]),
        ("timeouts: {prefill_s: 0}", ["'timeouts.prefill_s'", "greater than 0"]),
        ("{page_size: 16, max_total_tokens: 1000}", ["'max_total_tokens'", "multiple", "16"]),
        ("cluster_name: My Cluster", ["'cluster_name'", "My Cluster"]),
        ("[1, 2]", ["expected keys and values", "list"]),
        ("a: [", ["not YAML"]),
        ("kv_events_config: {endpont: 1}", ["'kv_events_config.endpont'", "allowed here"]),
        ("\udcff\udcfe", ["not text (UTF-8)", "YAML"]),
    ],
)
def test_config_file(run: Run, tmp_path: Path, text: str, wanted: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, errors="surrogateescape")
    outcome = run("serve", "--config", str(path))
    assert outcome.code == 2
    assert all(word in outcome.error for word in wanted), outcome.error


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--set", "page_sise=16"], ["'page_sise'", "page_size"]),
        (["--set", "page_size=3"], ["'page_size'", "1, 2, 4"]),
        (["--set", "timeouts.lease=1"], ["'timeouts.lease'", "lease_s"]),
        (["--set", "port"], ["--set port", "key=value"]),
        (["--set", "=1"], ["--set =1", "key=value"]),
        (["--set", "port.x=1"], ["--set port.x=1", "port is not a section"]),
        (["--set", "model=["], ["--set model=[", "not YAML"]),
        (["--set", "device=gpu"], ["'device'", "'auto', 'cpu' or 'cuda'"]),
        (["--dtype", "int8"], ["'dtype'", "float32", "bfloat16"]),
        (["--schedule-policy", "best"], ["'schedule_policy'", "fcfs", "dfs-weight"]),
        (["--retraction-policy", "youngest"], ["'retraction_policy'", "length", "priority"]),
        (["--schedule-conservativeness", "0"], ["'schedule_conservativeness'", "greater than 0"]),
        (["--max-queued-per-tenant", "0"], ["'max_queued_per_tenant'", "greater than or equal"]),
        (["--placement", "best"], ["'placement'", "cost", "round_robin"]),
        (["--mem-fraction-static", "0"], ["'mem_fraction_static'", "greater than 0"]),
        (["--mem-fraction-static", "1"], ["'mem_fraction_static'", "less than 1"]),
        (["--set", "routes=local"], ["'routes'", "a list of remote, remote+pull, local"]),
        (["--prefill", "0"], ["'prefill'", "greater than or equal to 1"]),
        (["--radix-eviction-policy", "random"], ["'radix_eviction_policy'", "lru", "slru"]),
        (["--radix-eviction-policy-config", "{"], ["--radix-eviction-policy-config", "not JSON"]),
        (["--radix-eviction-policy-config", "1"], ["--radix-eviction-policy-config", "object"]),
        (
            ["--radix-eviction-policy-config", '{"no_such": 1}'],
            ["'radix_eviction_policy_config'", "no_such"],
        ),
    ],
)
def test_settings(run: Run, arguments: list[str], wanted: list[str]) -> None:
    outcome = run("serve", *arguments)
    assert outcome.code == 2
    assert all(word in outcome.error for word in wanted), outcome.error


def test_absent_config_file(run: Run, tmp_path: Path) -> None:
    outcome = run("serve", "--config", str(tmp_path / "none.yaml"))
    assert outcome.code == 2
    assert "none.yaml: No such file" in outcome.error


def test_later_sources_win(run: Run, tmp_path: Path) -> None:
    """File, then --set, then an option: each error names the value that won."""
    path = tmp_path / "config.yaml"
    path.write_text("page_size: 3")
    arguments = ["serve", "--config", str(path)]
    assert "got 3" in run(*arguments).error
    arguments += ["--set", "page_size=5"]
    assert "got 5" in run(*arguments).error
    arguments += ["--page-size", "7"]
    assert "got 7" in run(*arguments).error


@pytest.mark.parametrize("option", ["--page-sise", "--tp-size", "--rectraction-policy"])
def test_unknown_option(run: Run, option: str) -> None:
    outcome = run("serve", option, "16")
    assert outcome.code == 2
    assert f"No such option: {option}" in outcome.err


def test_option_of_a_wrong_type(run: Run) -> None:
    outcome = run("serve", "--port", "http")
    assert outcome.code == 2
    assert "Invalid value for '--port'" in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(run: Run) -> None:
    outcome = run("serve", "--set", "device=cuda")
    assert outcome.code == 2
    assert outcome.error.startswith("device cuda: torch sees no GPU")


def test_port_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("serve", "--port", str(port))
    assert outcome.code == 2
    assert outcome.error == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_metrics_port_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("serve", "--port", "0", "--set", f"metrics_port={port}")
        complaint = f"metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"
        assert (outcome.code, outcome.error) == (2, complaint)
        outcome = run("serve", "--port", str(port), "--set", f"metrics_port={port}")
        assert (outcome.code, outcome.error) == (
            2,
            f"config key 'metrics_port': {port} is a gateway's port",
        )


def test_drain_names_a_worker(run: Run) -> None:
    outcome = run("drain", "")
    assert outcome.code == 2
    assert outcome.error.startswith("drain: no worker is named")


def test_simulate_writes_where_it_can(run: Run, tmp_path: Path) -> None:
    outcome = run("simulate", "--num-conversations", "2", "--json", str(tmp_path / "no" / "x.json"))
    assert outcome.code == 2
    assert "cannot be written" in outcome.error


def test_no_ray_at_the_address(run: Run, tiny_model: Path) -> None:
    outcome = run("serve", "--model", str(tiny_model), "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert "no Ray at 127.0.0.1:1" in outcome.error
    assert not ray.is_initialized()


# --- models ---


def serve_model(run: Run, folder: Path | str) -> str:
    """The error of serving it; nothing may have been started."""
    outcome = run("serve", "--model", str(folder), "--port", "0")
    assert outcome.code == 2
    assert not ray.is_initialized()
    return outcome.error


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_absent_model(run: Run, tmp_path: Path) -> None:
    error = serve_model(run, tmp_path / "none")
    assert "no such folder or file" in error
    assert "smollm2" in error


def test_folder_without_a_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: No such file" in serve_model(run, tmp_path / "empty")


def test_unsupported_architecture(run: Run, tiny_model: Path) -> None:
    edit_config(tiny_model, architectures=["GPT2LMHeadModel"])
    error = serve_model(run, tiny_model)
    assert "architecture GPT2LMHeadModel is not supported; use LlamaForCausalLM" in error


def test_missing_shard(run: Run, tiny_model: Path) -> None:
    shard = sorted(tiny_model.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"shard {shard.name}" in serve_model(run, tiny_model)


def test_truncated_shard(run: Run, tiny_model: Path) -> None:
    shard = sorted(tiny_model.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    error = serve_model(run, tiny_model)
    assert f"{shard.name}: not a readable safetensors file" in error


def test_shape_mismatch(run: Run, tiny_model: Path) -> None:
    edit_config(tiny_model, intermediate_size=128)
    error = serve_model(run, tiny_model)
    assert "mlp.gate_proj.weight has shape [112, 64]; the config expects [128, 64]" in error


def test_a_chat_template_that_is_none(run: Run, tiny_model: Path) -> None:
    """Known before anything is started."""
    make_tokenizer(tiny_model, "{{ messages }}")
    outcome = run("serve", "--model", str(tiny_model), "--chat-template", "nope", "--port", "0")
    assert outcome.code == 2
    assert "nope" in outcome.error
    assert not ray.is_initialized()


def test_more_context_than_the_model_has(run: Run, tiny_model: Path) -> None:
    outcome = run("serve", "--model", str(tiny_model), "--context-length", "257", "--port", "0")
    assert outcome.code == 2
    assert "'context_length': 257" in outcome.error
    assert "256 positions" in outcome.error


def test_no_room_for_the_model_in_its_share_of_the_memory(run: Run, tiny_model: Path) -> None:
    share = ["--mem-fraction-static", "1e-7"]
    outcome = run("serve", "--model", str(tiny_model), *share, "--port", "0")
    assert outcome.code == 2
    for words in ("'mem_fraction_static'", "on this machine, for 2 workers", "the weights take"):
        assert words in outcome.error
    assert not ray.is_initialized()


# --- clusters that run already, or do not ---


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["down"]])
def test_no_cluster_is_running(run: Run, command: list[str]) -> None:
    outcome = run(*command, "--cluster-name", "none-here")
    assert outcome.code == 2
    assert outcome.error == "no cluster 'none-here' is running"
    assert outcome.out == ""


def test_a_name_is_served_once(run: Run) -> None:
    registry.announce("mine", ["http://127.0.0.1:9"], None)
    outcome = run("serve", "--cluster-name", "mine")
    assert outcome.code == 2
    assert "'mine' is served already at http://127.0.0.1:9" in outcome.error
    assert str(os.getpid()) in outcome.error


def test_status_of_a_server_that_does_not_answer(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    registry.announce("mine", [url], None)
    outcome = run("status", "--cluster-name", "mine")
    assert outcome.code == 2
    assert f"{url} does not answer" in outcome.error


def test_a_broken_server_gives_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reply:
        def __enter__(self) -> Reply:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self) -> bytes:
            return b"<html>not ours</html>"

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Reply())
    registry.announce("mine", ["http://127.0.0.1:9"], None)
    outcome = run("status", "--cluster-name", "mine")
    assert outcome.code == 2
    assert "http://127.0.0.1:9 does not answer as pd-cluster does" in outcome.error


def test_the_version_is_the_packages(run: Run) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"pd-cluster {pd_cluster.__version__}\n")
