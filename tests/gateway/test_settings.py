"""From the command line and the model's folder to what the gateway serves."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pd_cluster import cli
from pd_cluster.cli import serving
from pd_cluster.config import Config, validate_config
from pd_cluster.gateway import actor
from pd_cluster.peers import ClusterSpec
from pd_cluster.pools import KvPool

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture
def serve(monkeypatch):
    """The configuration that a command line gives."""
    served: list[Config] = []
    monkeypatch.setattr(serving, "run_server", lambda config, address: served.append(config))
    monkeypatch.setattr(serving.registry, "find", lambda name: None)

    def run(*arguments: str, **environment: str) -> Config:
        result = CliRunner().invoke(cli.app, ["serve", *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return served.pop()

    return run


def test_options(serve, tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages }}")
    config = serve(
        *("--api-key", "one", "--api-key", "two", "--admin-key", "boss"),
        *("--served-model-name", "main", "--served-model-name", "other"),
        *("--sampling-defaults", "openai", "--chat-template", str(template)),
        *("--log-prompts", "--enable-cache-report"),
    )
    assert config.api_keys == ("one", "two")
    assert config.admin_key == "boss"
    assert (config.served_model_name, config.model_aliases) == ("main", ("other",))
    assert config.sampling_defaults == "openai"
    assert config.chat_template == str(template)
    assert config.log_prompts


def test_keys_by_the_environment(serve):
    config = serve(PD_API_KEYS="one two", PD_ADMIN_KEY="boss")
    assert (config.api_keys, config.admin_key) == (("one", "two"), "boss")


def test_options_of_every_kind(serve, tmp_path):
    """Zero is a value; a flag, JSON and a fraction too."""
    file = tmp_path / "c.yaml"
    file.write_text("max_queued_requests: 5\nport: 1\n")
    config = serve(
        *("--config", str(file), "--set", "page_size=4", "--page-size", "8"),
        *("--port", "0", "--max-queued-requests", "0", "--disable-radix-cache"),
        *("--mem-fraction-static", "0.5", "--schedule-policy", "lpm"),
        *("--radix-eviction-policy", "slru"),
        *("--radix-eviction-policy-config", '{"slru_protected_threshold": 2}'),
    )
    assert (config.port, config.max_queued_requests, config.page_size) == (0, 0, 8)
    assert config.disable_radix_cache is True
    assert (config.mem_fraction_static, config.schedule_policy) == (0.5, "lpm")
    assert config.radix_eviction_policy_config == {"slru_protected_threshold": 2}


def test_what_is_left_out(serve):
    config = serve()
    assert (config.api_keys, config.model_aliases, config.admin_key) == ((), (), None)
    assert (config.sampling_defaults, config.log_prompts) == ("model", False)


def test_a_templates_path_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "t.jinja").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert validate_config({"chat_template": "t.jinja"}).chat_template == str(tmp_path / "t.jinja")
    assert validate_config({"chat_template": "tool_use"}).chat_template == "tool_use"


@pytest.mark.parametrize("defaults", ["model", "openai"])
def test_what_the_gateway_knows_of_the_model(tmp_path, tokenizer, monkeypatch, defaults):
    """Every end-of-sequence id: the model's and the tokenizer's; the makers' sampling."""
    monkeypatch.setattr(actor, "log_as_json", lambda name: None)
    monkeypatch.setattr(actor, "Tokenizer", lambda folder, template: tokenizer)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    generation = {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = validate_config(
        {"model_aliases": ["b"], "sampling_defaults": defaults, "context_length": 48}
    )
    spec = ClusterSpec(
        local=True,
        config=config.model_dump_json(),
        model_folder=str(tmp_path),
        model_id="a",
        secret=b"",
        kv_pool=KvPool(tokens=64, pages=64, bytes=64, source="max_total_tokens"),
    )
    model = actor.GatewayActor(spec, "gateway-0").model
    assert (model.name, model.aliases) == ("a", ("b",))
    assert model.eos_token_ids == {1, 2, 257}
    wanted = {"temperature": 0.6, "top_k": 20} if defaults == "model" else {}
    assert model.sampling_defaults == wanted
    assert model.vocab_size == 97
    assert model.context_length == 48
