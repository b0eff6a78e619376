"""A real Prometheus that scrapes a cluster by the project's own configuration and rules."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from pd_cluster.config import config_dir
from tests.cluster.live import poll


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)

    def get(self, path: str, **parameters: str) -> Any:
        reply = self._http.get(f"/api/v1/{path}", params=parameters)
        assert reply.status_code == 200, (parameters, reply.text)
        return reply.json()["data"]

    def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series of an instant query."""
        data = self.get("query", query=expr)
        assert data["resultType"] == "vector", expr
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._http.close()


@contextmanager
def prometheus(metrics_url: str, folder: Path) -> Iterator[Prometheus]:
    """Scrapes every second, and evaluates the rules as often."""
    shutil.copytree(config_dir() / "prometheus" / "rules", folder / "rules")
    config = yaml.safe_load((config_dir() / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = (each for each in config["scrape_configs"] if each["job_name"] == "pd-cluster")
    job["static_configs"][0]["targets"] = [urlsplit(metrics_url).netloc]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://{address}")
    try:
        poll(server.is_ready, "Prometheus is not ready", (folder / "log").read_text)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(30)
