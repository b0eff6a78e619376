"""Backends that are packages of their own, and may be missing."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from pd_kernels.registry import BackendUnavailable

_LOG = logging.getLogger(__name__)


def triton_kernel(module: str, name: str = "") -> Callable[[], Any]:
    """A loader of the Triton implementation `name` (the module's own by default) in
    `triton_kernels.<module>`."""

    def load() -> Any:
        package("triton")
        return getattr(
            importlib.import_module(f"pd_kernels.triton_kernels.{module}"), name or module
        )

    return load


@cache
def package(name: str) -> Any:
    """The package of that name. Raises `BackendUnavailable`; a line in the log says why."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is there but broken raises what it likes
        _LOG.info("no %s kernels: %s", name, error)
        raise BackendUnavailable(f"{name}: {error}") from error
