"""Reading the JSON files that a model folder is described by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelError when it cannot be read or is none."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected an object, found {type(data).__name__}")
    return data
