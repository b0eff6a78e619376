"""The dashboards: the committed JSON is what the code makes, and Grafana's SDK takes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from pd_cluster.config import config_dir
from pd_cluster.observability.dashboards.files import dashboard_files
from tests.observability.endpoint import every_metric
from tests.observability.promtool import rules

GRAFANA = config_dir() / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
UNITS = {value for name, value in vars(units).items() if not name.startswith("_")}


def load(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text())
    return board


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_the_committed_files_are_what_the_code_makes():
    committed = {path.name: path.read_text() for path in FILES}
    assert committed == dashboard_files(), "run python -m pd_cluster.observability.dashboards"
    names = ("overview", "caches", "transfers", "scheduling", "workers")
    assert committed.keys() == {f"{name}.json" for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_sdk_reads_what_it_would_write(path):
    register_default_plugins()
    board = Dashboard.from_json(load(path))
    again = json.loads(JSONEncoder().encode(board))
    assert again == load(path)
    assert board.uid == f"pd-cluster-{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_panel_has_a_unit_and_says_what_to_do(path):
    board = load(path)
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles))
    places = set()
    for panel in board["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert len(panel["description"]) > 60, panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"])
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert 0 <= x < 24
                assert (x, y) not in places, f"{panel['title']} lies over another panel"
                places.add((x, y))
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "cluster"}


def test_expressions_name_metrics_that_exist_and_choose_the_cluster():
    known = every_metric()
    used = set()
    for path in FILES:
        for expr in expressions(load(path)):
            names = re.findall(r"\b(pd_\w+|up)\{", expr)
            assert names, expr
            assert expr.count('cluster=~"$cluster"') == len(names), expr
            used |= set(names)
    for rule in (*rules("alerts"), *rules("recording")):
        # What has a colon before or behind it is a record's name.
        used |= set(re.findall(r"(?<![:\w])pd_\w+(?![:\w])", rule["expr"]))
    assert used - known <= {"up"}
    # And nothing is exported in vain.
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    assert families <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}


def test_provisioning():
    provisioning = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "pd-cluster.yaml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
