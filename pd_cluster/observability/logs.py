"""Structured logs: one JSON object a line, by the standard library's logging."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class JsonFormatter(logging.Formatter):
    """Time (UTC), level, logger and message; what `extra={"fields": {...}}` gave stands beside
    them.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry.update(fields)
        return json.dumps(entry, default=str, ensure_ascii=False)


def log_as_json(process: str, level: int = logging.INFO) -> None:
    """Sends this package's logs to stderr as JSON lines; `process` names who writes them."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process))
    logger = logging.getLogger("pd_cluster")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
