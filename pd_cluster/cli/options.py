"""The options of `serve`: most are keys of the configuration, whose descriptions they show."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from pd_cluster.config import Config
from pd_cluster.errors import ConfigError

# The groups of --help, in its order; an option is its key with dashes.
KEYS = {
    "Options": ("host", "port"),
    "Model": (
        "model",
        "served_model_name",
        "chat_template",
        "sampling_defaults",
        "dtype",
        "context_length",
    ),
    "KV cache": (
        "page_size",
        "max_total_tokens",
        "mem_fraction_static",
        "radix_eviction_policy",
        "radix_eviction_policy_config",
        "disable_radix_cache",
        "radix_cache_backend",
        "strip_thinking_cache",
        "kv_events_config",
    ),
    "KV cache tiers": (
        "enable_hierarchical_cache",
        "hicache_ratio",
        "hicache_size",
        "hicache_write_policy",
        "hicache_storage_backend",
        "hicache_storage_backend_extra_config",
        "hicache_storage_size",
        "hicache_storage_prefetch_policy",
    ),
    "Scheduling": (
        "placement",
        "schedule_policy",
        "schedule_conservativeness",
        "enable_priority_scheduling",
        "retraction_policy",
    ),
    "Limits": (
        "chunked_prefill_size",
        "max_prefill_tokens",
        "max_queued_per_tenant",
        "max_running_per_tenant",
        "max_running_requests",
        "max_queued_requests",
    ),
    "Access and logs": ("api_key", "admin_key", "log_prompts"),
    "Cluster": ("prefill", "decode", "cluster_name", "gateways"),
}
_ENVIRONMENT = {"api_key": "PD_API_KEYS", "admin_key": "PD_ADMIN_KEY"}
# An option that may be given several times, and says one value at a time.
_KEY_OF = {"api_key": "api_keys"}


@dataclass(frozen=True)
class _Kind:
    """Of an option's value on the command line."""

    type: Any
    choices: tuple[object, ...] = ()
    is_json: bool = False


def command(run: Callable[..., None]) -> Callable[..., None]:
    """`run(config, set_, overrides, ...)` as a command with all of `serve`'s options: `overrides`
    are keys of the configuration, None where the option was not given.
    """
    signature = inspect.signature(run, eval_str=True).parameters.values()
    own = [each for each in signature if each.name != "overrides"]
    keys = [_parameter(key, group) for group, keys in KEYS.items() for key in keys]

    def call(**given: Any) -> None:
        overrides = read(given)
        run(overrides=overrides, **{each.name: given[each.name] for each in own})

    # Groups come in the order in which their options do; ours end them.
    first = [each for each in own if _group(each) is None]
    last = [each for each in own if _group(each) is not None]
    call.__signature__ = inspect.Signature([*first, *keys, *last])  # type: ignore[attr-defined]
    call.__annotations__ = {}
    call.__name__, call.__doc__ = run.__name__, run.__doc__
    return call


def read(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's keys from the options' values."""
    overrides: dict[str, Any] = {}
    for key in (key for keys in KEYS.values() for key in keys):
        value = given[key]
        if key == "served_model_name":
            overrides[key] = value[0] if value else None
            overrides["model_aliases"] = value[1:] if value else None
        elif _kind(key).is_json:
            overrides[key] = _json(_flag(key), value)
        else:
            # A flag or a list that was not given says nothing.
            overrides[_KEY_OF.get(key, key)] = None if value is False or value == [] else value
    return overrides


def _parameter(key: str, group: str) -> inspect.Parameter:
    kind = _kind(key)
    option = typer.Option(
        _flag(key),
        help=_help(key, kind),
        envvar=_ENVIRONMENT.get(key),
        rich_help_panel=group,
        metavar=None if kind.type is bool else f"<{_name(kind)}>",
    )
    value: Any = kind.type if kind.type is bool else kind.type | None
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind.type is bool else None,
        annotation=Annotated[value, option],
    )


def _group(parameter: inspect.Parameter) -> str | None:
    _, option = get_args(parameter.annotation)
    group: str | None = option.rich_help_panel
    return group


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _help(key: str, kind: _Kind) -> str:
    field = Config.model_fields[_KEY_OF.get(key, key)]
    assert field.description, f"config key {key} has no description"
    text = field.description[0].upper() + field.description[1:]
    if kind.choices:
        text += f" ({', '.join(map(str, kind.choices))})"
    if get_origin(kind.type) is list:
        text += "; may be given again"
    shown = field.get_default(call_default_factory=True)
    return text if shown in (None, (), {}, False) else f"{text} [default: {shown}]"


def _name(kind: _Kind) -> str:
    names = {str: "text", int: "int", float: "number"}
    return "JSON" if kind.is_json else names.get(kind.type, "text")


def _kind(key: str) -> _Kind:
    """How the value of a key is written."""
    annotation: Any = Config.model_fields[_KEY_OF.get(key, key)].annotation
    if get_origin(annotation) in (Union, UnionType):
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        annotation = bool if bool in kinds else kinds[0]
    if key == "served_model_name" or get_origin(annotation) is tuple:
        return _Kind(list[str])
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return _Kind(type(choices[0]), choices)
    if get_origin(annotation) is dict or issubclass(annotation, BaseModel):
        return _Kind(str, is_json=True)
    return _Kind(annotation)


def _json(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: expected a JSON object")
    return value


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="<path>", help="YAML file; configs/local.yaml if left out"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="<key=value>", help="Any key of the file; dots reach into sections"
    ),
]
