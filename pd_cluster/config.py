"""The configuration of a cluster: one YAML file, validated whole at start.

Precedence: command line, then `--set key=value`, then the file, then the defaults below. Keys that
SGLang's users know keep SGLang's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pd_cluster.errors import ConfigError
from pd_cluster.types import Route


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TransferConfig(_Section):
    """How pages move between workers."""

    backend: Literal["ucx", "nixl"] = Field(
        "ucx", description="the transport library: ours, or the upstream wheel"
    )
    max_inflight_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="to and from one peer at once; requests take turns"
    )
    verify: bool = Field(False, description="check pages on arrival; compute again what is corrupt")
    ucx: dict[str, str] = Field(
        default_factory=dict,
        description="UCX's settings without UCX_, e.g. NET_DEVICES and TLS; chosen by default",
    )

    @field_validator("ucx", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value:
            if str(name).startswith("UCX_"):
                raise ValueError(f"write {str(name)[4:]}, not {name}")
        return {name: str(each) for name, each in value.items()}


class ResourcesConfig(_Section):
    """What Ray shall have free on a node for each worker of a role: num_gpus, num_cpus, memory
    (bytes), or names that the nodes were given. Nothing by default: any node will do.
    """

    prefill: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="for a prefill worker: num_gpus, num_cpus, memory, or names of your own",
    )
    decode: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="the same for a decode worker"
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _names(cls, value: dict[str, float]) -> dict[str, float]:
        for name, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if name in value:
                raise ValueError(f"write {option}, not {name}")
        return value


class TimeoutConfig(_Section):
    """Deadlines of the states of a request, in seconds."""

    request_s: float = Field(600.0, gt=0, description="from arrival to the last token")
    prefill_s: float = Field(600.0, gt=0, description="from the reservation to the first token")
    transfer_s: float = Field(30.0, gt=0, description="from the first token to the last page")
    drain_s: float = Field(10.0, gt=0, description="between two requests to acknowledge an abort")
    lease_s: float = Field(10.0, gt=0, description="from a placement to its first sign of life")
    heartbeat_s: float = Field(1.0, gt=0, description="between two reports of a worker")
    keepalive_s: float = Field(15.0, gt=0, description="between comments on a stream that waits")
    start_s: float = Field(300.0, gt=0, description="from the start of a worker to ready")
    scale_in_s: float = Field(
        60.0, ge=0, description="that a worker to be removed gets to finish what it runs"
    )
    shutdown_s: float = Field(5.0, ge=0, description="that running streams get on SIGTERM")


class KvEventsConfig(_Section):
    """Publishing of KV events over ZMQ, as vLLM and SGLang have it."""

    publisher: Literal["zmq"] = "zmq"
    endpoint: str = Field(
        "tcp://127.0.0.1:5557",
        pattern=r"^tcp://.+:\d+$",
        description="of the first prefill worker: each worker has a port of its own from here on",
    )
    replay_endpoint: str | None = Field(
        None, pattern=r"^tcp://.+:\d+$", description="answers with batches that were missed"
    )
    buffer_steps: int = Field(10_000, ge=1, description="batches kept for replay")
    hwm: int = Field(100_000, ge=1, description="batches queued for a slow subscriber")
    topic: str = ""
    block_size: int = Field(64, ge=1, description="tokens of a block in events")


class Config(_Section):
    """All that `pd-cluster serve` can be told."""

    cluster_name: str = Field(
        "pd", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="tells clusters on one Ray apart"
    )
    model: str = Field(
        "smollm2", min_length=1, description="known name, Hub id, folder or GGUF file"
    )
    served_model_name: str | None = Field(
        None, description="the model's name in the API; its own by default"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of weights, computing and KV"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what workers compute on; auto: a GPU where a worker finds one"
    )
    context_length: int | None = Field(None, ge=2, description="tokens; the model's own by default")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(30000, ge=0, le=65535, description="port to listen on; 0: any free one")
    metrics_port: int | None = Field(
        0,
        ge=0,
        le=65535,
        description="of the whole cluster's metrics, beside the coordinator; 0: any, null: none",
    )
    admin_key: str | None = Field(
        None,
        min_length=1,
        description="for /admin and /flush_cache; without one only from this machine",
    )
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="one of them is needed for every request; none: open to all"
    )
    model_aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="further names that requests may give the model"
    )
    chat_template: str | None = Field(
        None, min_length=1, description="a file, or the name of one of the model's own"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model", description="for what a request leaves out: generation_config.json's, or OpenAI's"
    )
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="of an HTTP request")
    max_messages: int = Field(4096, ge=1, description="in one chat request")
    recent_requests: int = Field(1000, ge=0, description="whose stories are kept after their end")
    log_prompts: bool = Field(False, description="put prompts into the log")

    prefill: int = Field(1, ge=1, le=64, description="prefill workers")
    decode: int = Field(1, ge=1, le=64, description="decode workers")
    gateways: int = Field(1, ge=1, le=64, description="HTTP servers, on successive ports")
    threads: int | None = Field(None, ge=1, description="per worker; all cores by default")

    page_size: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = Field(
        1, description="tokens of a KV page"
    )
    layout: Literal["page_first", "layer_first"] = Field(
        "page_first", description="of a page in memory"
    )
    max_total_tokens: int = Field(
        32768,
        ge=16,
        description="KV pool of each worker, in tokens; the most, beside mem_fraction_static",
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="size KV pools by memory: this share of what is available, divided among the"
        " workers of a host, is for weights and pool",
    )
    disable_radix_cache: bool | Literal["prefill", "decode"] = Field(
        False, description="keep no prefixes; prefill or decode: none on workers of that role"
    )
    radix_cache_backend: str = Field(
        "radix", min_length=1, description="a registered prefix cache, or module:name"
    )
    strip_thinking_cache: bool = Field(False, description="keep prompts only, not answers")
    radix_eviction_policy: Literal["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"] = Field(
        "lru", description="which prefixes go first"
    )
    radix_eviction_policy_config: dict[str, Any] = Field(
        default_factory=dict, description="for the eviction policy"
    )

    enable_hierarchical_cache: bool = Field(False, description="keep what is evicted, lower down")
    hicache_ratio: float = Field(2.0, gt=0, description="host memory, as a multiple of the KV pool")
    hicache_size: float = Field(0.0, ge=0, description="host memory in GB; 0: by hicache_ratio")
    hicache_write_policy: Literal["write_through", "write_back", "write_through_selective"] = Field(
        "write_through", description="when pages go down to host memory"
    )
    hicache_storage_backend: str | None = Field(
        None, min_length=1, description="below host memory: file, redis or module:factory"
    )
    hicache_storage_backend_extra_config: dict[str, Any] = Field(
        default_factory=dict, description="for the storage backend"
    )
    hicache_storage_size: float = Field(16.0, gt=0, description="GB on this host (file)")
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = Field(
        "timeout", description="how long a request waits for what storage holds"
    )
    kv_events_config: KvEventsConfig | None = Field(None, description="where KV events go")

    chunked_prefill_size: int = Field(
        512, ge=1, description="tokens of one prompt computed in one step"
    )
    max_prefill_tokens: int | None = Field(
        None, ge=1, description="tokens of all prompts in one step; by default chunked_prefill_size"
    )
    local_prefill_size: int = Field(
        64,
        ge=1,
        description="prompt tokens that decode computes beside a step of running sequences",
    )
    placement: Literal["cost", "prefix_prefill_only", "least_loaded", "round_robin", "random"] = (
        Field("cost", description="which workers and route serve a request")
    )
    routes: tuple[Route, ...] = Field(
        get_args(Route), description="ways that placement cost may choose from"
    )
    itl_limit_s: float = Field(
        0.05,
        gt=0,
        description="that running streams may wait between tokens for a prompt computed on decode",
    )
    schedule_policy: Literal[
        "fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key"
    ] = Field("fcfs", description="order of the requests that wait for a placement")
    schedule_conservativeness: float = Field(
        1.0, gt=0, description="times the growth of running answers that admission counts"
    )
    enable_priority_scheduling: bool = Field(
        False, description="higher priorities first, taking the place of lower ones that run"
    )
    retraction_policy: Literal["length", "priority"] = Field(
        "length", description="who gives up its pages first when decode runs out of them"
    )
    max_queued_per_tenant: int | None = Field(
        None, ge=1, description="waiting requests of one API key, or one cache_salt without keys"
    )
    max_running_per_tenant: int | None = Field(
        None, ge=1, description="placed requests of one API key, or one cache_salt without keys"
    )
    max_running_requests: int = Field(64, ge=1, description="sequences of a decode worker")
    max_queued_requests: int = Field(1024, ge=0, description="waiting for a placement")
    max_attempts: int = Field(8, ge=1, description="tries that may fail before a request fails")

    resources: ResourcesConfig = Field(
        ResourcesConfig(), description="what Ray shall have free on a node for a worker of a role"
    )
    transfer: TransferConfig = Field(TransferConfig(), description="how pages move between workers")
    timeouts: TimeoutConfig = Field(
        TimeoutConfig(), description="deadlines of the states of a request, in seconds"
    )

    @field_validator("chat_template")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Other processes that read the file have working directories of their own."""
        path = None if value is None else Path(value).expanduser()
        return str(path.resolve()) if path is not None and path.is_file() else value

    @field_validator("max_total_tokens")
    @classmethod
    def _whole_pages(cls, value: int, info: Any) -> int:
        page_size = info.data.get("page_size", 1)
        if value % page_size:
            raise ValueError(f"must be a multiple of page_size ({page_size})")
        return value

    @field_validator("enable_hierarchical_cache")
    @classmethod
    def _cache_to_extend(cls, value: bool, info: Any) -> bool:
        if value and info.data.get("disable_radix_cache") is True:
            raise ValueError("nothing to extend with disable_radix_cache")
        return value

    @field_validator("routes")
    @classmethod
    def _with_remote(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "remote" not in value:
            raise ValueError("remote must be among them: the others need something that is held")
        return value

    @field_validator("itl_limit_s", "routes")
    @classmethod
    def _of_cost(cls, value: object, info: Any) -> object:
        placement = info.data.get("placement")
        if placement != "cost" and value != cls.model_fields[info.field_name].default:
            raise ValueError(f"only placement cost knows routes beside remote, not {placement}")
        return value

    @property
    def uses_priority(self) -> bool:
        """Whether a request's priority changes anything."""
        policies = (self.schedule_policy, self.retraction_policy, self.radix_eviction_policy)
        return self.enable_priority_scheduling or "priority" in policies

    def needs(self, role: str) -> dict[str, float]:
        """What Ray shall have free for each worker of a role: with device cuda, a GPU."""
        named: dict[str, float] = getattr(self.resources, role)
        return {"num_gpus": 1.0, **named} if self.device == "cuda" else named

    def keeps_prefixes(self, role: str) -> bool:
        """Whether workers of that role have a prefix cache."""
        return self.disable_radix_cache not in (True, role)

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
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not text (UTF-8); expected YAML") from error
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
            kinds = (annotation, *get_args(annotation))  # of an optional section: what is not None
            (model,) = (
                kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)
            )
            fields = model.model_fields
        return f"unknown config key {key!r}; allowed here: {', '.join(fields)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("tuple_type", "list_type"):
        message = "expected a list, as in [a, b]"
        allowed = _items(location)
        if allowed:
            message = f"expected a list of {', '.join(allowed)}, as in [{allowed[0]}]"
    return f"config key {key!r}: {message} (got {error['input']!r})"


def _items(location: list[str]) -> tuple[str, ...]:
    """The names that a list may have, where they are known."""
    annotation: Any = Config.model_fields[location[0]].annotation
    (item, *_) = get_args(annotation) or (None,)
    return get_args(item) if get_origin(item) is Literal else ()
