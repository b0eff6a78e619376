"""Grafana's dashboards as code. `python -m pd_cluster.observability.dashboards` writes the JSON."""
