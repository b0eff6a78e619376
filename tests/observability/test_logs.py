from __future__ import annotations

import json
import logging
import sys

import pytest

from pd_cluster.observability.logs import JsonFormatter, log_as_json


def test_a_line_is_one_object_with_the_fields_beside_the_message():
    record = logging.LogRecord("pd_cluster.x", logging.INFO, "f", 1, "a %s\nb", ("c",), None)
    record.created, record.msecs = 0.0, 7.0
    record.fields = {"request_id": "r", "n": 2}
    line = JsonFormatter("gateway-0").format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "info",
        "process": "gateway-0",
        "logger": "pd_cluster.x",
        "message": "a c\nb",
        "request_id": "r",
        "n": 2,
    }


def test_errors_have_their_traceback():
    try:
        raise ValueError("broken")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("pd_cluster", logging.ERROR, "f", 1, "oops", (), info)
    assert "ValueError: broken" in json.loads(JsonFormatter("p").format(record))["error"]


def test_the_package_writes_json_to_stderr_once(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("pd_cluster")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        log_as_json("one")
        log_as_json("two")
        logging.getLogger("pd_cluster.part").info("hello")
        logging.getLogger("pd_cluster.part").debug("quiet")
    finally:
        logger.handlers, logger.level, logger.propagate = before
        logging.getLogger("pd_cluster.part").setLevel(logging.NOTSET)
        logger.setLevel(before[1])
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["process"] == "two"
