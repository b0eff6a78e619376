"""Models of the Hugging Face Hub, through its own client, cache and environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import tqdm

from pd_cluster.errors import ModelError

# What is read of a model: never the same weights again in another format or sharding.
_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `organisation/model`."""
    return _ID.fullmatch(name) is not None


def fetch(name: str, *, progress: bool) -> Path:
    """The folder of model `name` (`organisation/model`) in the Hub's cache, at its main revision.

    What is missing is downloaded first. HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE and the like work as everywhere; without a connection the cached revision is
    used. `progress` shows bars where stderr is a terminal. Raises ModelError, one line, for what
    cannot be had.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_FILES, tqdm_class=None if progress else _NoBars
            )
        )
    # Also its HTTP library raises, and which one that is differs among versions.
    except Exception as error:
        raise ModelError(f"model {name}: {_reason(error, name)}") from error


def _reason(error: Exception, name: str) -> str:
    match error:
        case errors.GatedRepoError():
            return (
                f"its owner asks for consent first: give it at {constants.ENDPOINT}/{name}, then "
                f"set HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{constants.ENDPOINT} knows no such model, or it is private and HF_TOKEN does not "
                f"open it"
            )
        case errors.LocalEntryNotFoundError():
            why = "HF_HUB_OFFLINE is set"
            if not constants.HF_HUB_OFFLINE:
                why = f"{constants.ENDPOINT} cannot be reached ({_line(error.__cause__ or error)})"
            return f"not whole in the cache {constants.HF_HUB_CACHE}, and {why}"
    return f"cannot be fetched from {constants.ENDPOINT}: {_line(error)}"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _NoBars(tqdm):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]
