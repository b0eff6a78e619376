"""All dashboards, as the files that Grafana is provisioned with."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from pd_cluster.observability.dashboards.caches import CACHES
from pd_cluster.observability.dashboards.overview import OVERVIEW
from pd_cluster.observability.dashboards.scheduling import SCHEDULING
from pd_cluster.observability.dashboards.transfers import TRANSFERS
from pd_cluster.observability.dashboards.workers import WORKERS

DASHBOARDS = (OVERVIEW, CACHES, TRANSFERS, SCHEDULING, WORKERS)


def dashboard_files() -> dict[str, str]:
    """File name → JSON."""
    encoder = JSONEncoder(indent=2, sort_keys=True)
    return {f"{each.name.lower()}.json": f"{encoder.encode(each.build())}\n" for each in DASHBOARDS}
