"""Writes the dashboards' JSON: python -m pd_cluster.observability.dashboards [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from pd_cluster.config import config_dir
from pd_cluster.observability.dashboards.files import dashboard_files

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else config_dir() / "grafana" / "dashboards"
folder.mkdir(parents=True, exist_ok=True)
for name, text in dashboard_files().items():
    (folder / name).write_text(text)
    print(folder / name)
