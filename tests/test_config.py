"""The configuration: validated whole, errors that name the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_cluster.config import Config, default_config_path, load_config
from pd_cluster.errors import ConfigError


def test_the_default_file_is_valid() -> None:
    config = load_config()
    assert (config.prefill, config.decode, config.model) == (1, 1, "smollm2")
    assert default_config_path().name == "local.yaml"


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\npage_size: 2\nmax_running_requests: 3\n")
    config = load_config(file, ["page_size=4", "max_running_requests=5"], {"page_size": 8})
    assert (config.port, config.page_size, config.max_running_requests) == (1, 8, 5)
    assert load_config(file, None, {"page_size": None}).page_size == 2


def test_settings_reach_into_sections() -> None:
    assert load_config(settings=["timeouts.request_s=5"]).timeouts.request_s == 5


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("colour=red", ["colour", "cluster_name"]),
        ("timeouts.colour=1", ["timeouts.colour", "request_s"]),
        ("page_size=3", ["page_size", "16"]),
        ("port=http", ["port", "http"]),
        ("port=70000", ["port", "65535"]),
        ("layout=diagonal", ["layout", "page_first", "layer_first"]),
        ("dtype=int4", ["dtype", "bfloat16"]),
        ("prefill=0", ["prefill", "1"]),
        ("cluster_name=A B", ["cluster_name"]),
        ("timeouts=5", ["timeouts"]),
        ("port.x=5", ["port"]),
        ("novalue", ["key=value"]),
        ("port=[", ["YAML"]),
        ("schedule_policy=best", ["schedule_policy", "fcfs", "routing-key"]),
        ("retraction_policy=youngest", ["retraction_policy", "length", "priority"]),
        ("schedule_conservativeness=0", ["schedule_conservativeness", "greater than 0"]),
        ("max_running_per_tenant=0", ["max_running_per_tenant", "1"]),
        ("max_prefill_tokens=0", ["max_prefill_tokens", "1"]),
        ("routes=foo", ["'routes'", "a list of remote, remote+pull, local", "'foo'"]),
        ("api_keys=foo", ["'api_keys'", "a list, as in [a, b]", "'foo'"]),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(setting: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(settings=[setting])
    for part in parts:
        assert part in str(error.value)


def test_a_limit_of_a_route_that_is_never_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="itl_limit_s.*placement cost.*random"):
        load_config(settings=["itl_limit_s=0.2", "placement=random"])
    config = load_config(settings=["itl_limit_s=0.2", "placement=cost"])
    # Every process reads it again, with no key left out.
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_pool_is_whole_pages() -> None:
    with pytest.raises(ConfigError, match="max_total_tokens.*page_size"):
        load_config(settings=["page_size=16", "max_total_tokens=1000"])


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load_config(file)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_every_key_of_the_default_file_is_a_field() -> None:
    assert set(load_config().model_dump()) == set(Config.model_fields)


def test_a_worker_on_cuda_needs_a_gpu() -> None:
    assert Config().needs("prefill") == {}
    config = Config(device="cuda", resources={"decode": {"num_gpus": 0.5, "decode": 1}})
    assert config.needs("prefill") == {"num_gpus": 1}
    assert config.needs("decode") == {"num_gpus": 0.5, "decode": 1}
