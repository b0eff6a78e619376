"""The configuration of a cluster: one YAML file, validated whole at start.

Precedence: command line, then `--set key=value`, then the file, then the defaults below. Keys that
SGLang's users know keep SGLang's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pd_cluster.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TransferConfig(_Section):
    """How pages move between workers."""

    backend: Literal["ucx"] = Field("ucx", description="the transport library")


class TimeoutConfig(_Section):
    """Deadlines of the states of a request, in seconds."""

    request_s: float = Field(600.0, gt=0, description="from arrival to the last token")
    prefill_s: float = Field(600.0, gt=0, description="from the reservation to the first token")
    transfer_s: float = Field(30.0, gt=0, description="from the first token to the last page")
    drain_s: float = Field(10.0, gt=0, description="between two requests to acknowledge an abort")
    lease_s: float = Field(10.0, gt=0, description="from a placement to its first sign of life")
    heartbeat_s: float = Field(1.0, gt=0, description="between two reports of a worker")
    start_s: float = Field(300.0, gt=0, description="from `serve` to ready")
    shutdown_s: float = Field(5.0, ge=0, description="that running streams get on SIGTERM")


class Config(_Section):
    """All that `pd-cluster serve` can be told."""

    cluster_name: str = Field("pd", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    model: str = Field("smollm2", min_length=1, description="known name, folder or GGUF file")
    served_model_name: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_length: int | None = Field(None, ge=2, description="tokens; the model's own by default")

    host: str = "127.0.0.1"
    port: int = Field(30000, ge=0, le=65535, description="0: any free port")
    admin_key: str | None = Field(None, min_length=1)

    prefill: int = Field(1, ge=1, le=64, description="prefill workers")
    decode: int = Field(1, ge=1, le=64, description="decode workers")
    gateways: int = Field(1, ge=1, le=64, description="HTTP servers, on successive ports")
    threads: int | None = Field(None, ge=1, description="per worker; all cores by default")

    page_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = 1
    layout: Literal["page_first", "layer_first"] = "page_first"
    max_total_tokens: int = Field(32768, ge=16, description="KV pool of each worker, in tokens")
    disable_radix_cache: bool = False
    radix_eviction_policy: Literal["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"] = "lru"
    radix_eviction_policy_config: dict[str, Any] = Field(default_factory=dict)

    chunked_prefill_size: int = Field(512, ge=1, description="prompt tokens computed in one step")
    local_prefill_size: int = Field(
        64,
        ge=1,
        description="prompt tokens that decode computes beside a step of running sequences",
    )
    placement: Literal["cost", "prefix_prefill_only", "least_loaded", "round_robin", "random"] = (
        "least_loaded"
    )
    max_running_requests: int = Field(64, ge=1, description="sequences of a decode worker")
    max_queued_requests: int = Field(1024, ge=0, description="waiting for a placement")
    max_attempts: int = Field(8, ge=1, description="tries that may fail before a request fails")

    transfer: TransferConfig = TransferConfig()
    timeouts: TimeoutConfig = TimeoutConfig()

    @field_validator("max_total_tokens")
    @classmethod
    def _whole_pages(cls, value: int, info: Any) -> int:
        page_size = info.data.get("page_size", 1)
        if value % page_size:
            raise ValueError(f"must be a multiple of page_size ({page_size})")
        return value

    @property
    def num_pages(self) -> int:
        return self.max_total_tokens // self.page_size


def default_config_path() -> Path:
    """configs/local.yaml, in an installed wheel or in a checkout."""
    return config_dir() / "local.yaml"


def config_dir() -> Path:
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_config(
    path: Path | None = None,
    settings: list[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The validated configuration.

    `settings` are `key=value` strings (dotted keys reach into sections, values are YAML);
    `overrides` are top-level keys from the command line, None meaning not given. Raises
    ConfigError naming the key and what is allowed.
    """
    path = path or default_config_path()
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"config file {path}: expected keys and values, found {type(data).__name__}"
        )
    for setting in settings or []:
        _apply_setting(data, setting)
    data.update({key: value for key, value in (overrides or {}).items() if value is not None})
    return validate_config(data)


def validate_config(data: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(each) for each in error.errors())) from error


def _apply_setting(data: dict[str, Any], setting: str) -> None:
    key, equals, value = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {setting}: expected key=value")
    *sections, last = key.strip().split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {setting}: {section} is not a section")
    try:
        target[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting}: the value is not YAML: {error}") from error


def _explain(error: Any) -> str:
    """One pydantic error as a sentence that names the key and what is allowed."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        fields = Config.model_fields
        for section in location[:-1]:
            annotation = fields[section].annotation
            assert isinstance(annotation, type)
            assert issubclass(annotation, BaseModel)
            fields = annotation.model_fields
        return f"unknown config key {key!r}; allowed here: {', '.join(fields)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"config key {key!r}: {message} (got {error['input']!r})"
