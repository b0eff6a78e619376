"""Prometheus' configuration and rules: its own tools accept them, and alerts fire and clear."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pd_cluster.config import config_dir
from tests.observability.promtool import PROMETHEUS, RULES, needs_prometheus, promtool, rules

HIGH = "0+60x30 1800x60"  # one a second for half an hour, then no more
# Alert: (series and values minute by minute, the minute when it fires, when it is clear again).
ALERTS: dict[str, tuple[dict[str, str], int, int]] = {
    "PdClusterUnreachable": ({'up{job="pd-cluster", cluster="pd"}': "1x5 0x10 1x20"}, 9, 20),
    "PdNoWorkers": (
        {
            'pd_workers{cluster="pd", role="decode", state="ready"}': "2x5 0x10 2x20",
            'pd_workers{cluster="pd", role="prefill", state="ready"}': "1x60",
            'pd_workers{cluster="pd", role="decode", state="lost"}': "0x60",
        },
        *(9, 20),
    ),
    "PdWorkerLost": (
        {'pd_workers{cluster="pd", role="decode", state="lost"}': "0x5 1x10 0x20"},
        *(10, 20),
    ),
    "PdRequestsFail": (
        {
            'pd_request_total{cluster="pd", finish_reason="error"}': "0+6x20 120x60",
            'pd_request_total{cluster="pd", finish_reason="stop"}': "0+60x80",
        },
        *(15, 40),
    ),
    "PdTimeToFirstTokenHigh": (
        {
            f'pd_time_to_first_token_seconds_bucket{{cluster="pd", le="{le}"}}': values
            for le, values in {"10.0": "0x90", "30.0": HIGH, "+Inf": HIGH}.items()
        },
        *(25, 50),
    ),
    "PdInterTokenLatencyHigh": (
        {
            f'pd_inter_token_latency_seconds_bucket{{cluster="pd", le="{le}"}}': values
            for le, values in {"1.0": "0x90", "2.5": HIGH, "+Inf": HIGH}.items()
        },
        *(25, 50),
    ),
    "PdQueueStands": (
        {'pd_num_requests_waiting{cluster="pd", role="coordinator"}': "0x5 3x20 0x20"},
        *(20, 30),
    ),
    "PdAdmissionsRefused": (
        {
            'pd_admission_rejected_total{cluster="pd", reason="queue_full"}': HIGH,
            'pd_admission_rejected_total{cluster="pd", reason="never_fits"}': HIGH,
        },
        *(15, 50),
    ),
    "PdRetractions": (
        {
            'pd_retractions_total{cluster="pd", policy="length"}': HIGH,
            'pd_retractions_total{cluster="pd", policy="scale_in"}': "0+60x90",
        },
        *(25, 50),
    ),
    "PdKvPoolFull": (
        {
            'pd_kv_tokens{cluster="pd", role="decode", state="protected"}': "96x20 10x30",
            'pd_kv_tokens{cluster="pd", role="decode", state="evictable"}': "2x20 45x30",
            'pd_kv_tokens{cluster="pd", role="decode", state="free"}': "2x20 45x30",
        },
        *(15, 30),
    ),
    "PdTransfersFail": (
        {'pd_kv_transfer_failures_total{cluster="pd", reason="peer lost"}': HIGH},
        *(15, 50),
    ),
    "PdPrefixIndexLags": (
        {'pd_prefix_index_lag_seconds{cluster="pd", worker="decode-0"}': "0x5 60x20 0x20"},
        *(15, 30),
    ),
    "PdLeasesExpire": ({'pd_leases_expired_total{cluster="pd"}': HIGH}, 25, 50),
    "PdTierErrors": ({'pd_tier_errors_total{cluster="pd", worker="decode-0"}': HIGH}, 15, 50),
}
# Record: (series, its value after ten minutes).
RECORDS: dict[str, tuple[dict[str, str], float]] = {
    "cluster:pd_request_errors:ratio_rate5m": (
        {
            'pd_request_total{cluster="pd", finish_reason="error"}': "0+1x20",
            'pd_request_total{cluster="pd", finish_reason="stop"}': "0+3x20",
        },
        0.25,
    ),
    "cluster:pd_time_to_first_token_seconds:p95_5m": (
        {
            f'pd_time_to_first_token_seconds_bucket{{cluster="pd", le="{le}"}}': "0+20x20"
            for le in ("1.0", "+Inf")
        },
        0.95,
    ),
    "cluster:pd_inter_token_latency_seconds:p99_5m": (
        {
            f'pd_inter_token_latency_seconds_bucket{{cluster="pd", le="{le}"}}': "0+20x20"
            for le in ("1.0", "+Inf")
        },
        0.99,
    ),
    "cluster:pd_prompt_tokens_cached:ratio_rate5m": (
        {
            'pd_prompt_tokens_by_source_total{cluster="pd", source="computed"}': "0+1x20",
            'pd_prompt_tokens_by_source_total{cluster="pd", source="prefill_hit"}': "0+3x20",
        },
        0.75,
    ),
    "cluster:pd_kv_transfer_avoided:ratio_rate5m": (
        {
            'pd_kv_transfer_bytes_total{cluster="pd", worker="w"}': "0+100x20",
            'pd_kv_transfer_avoided_bytes_total{cluster="pd", worker="w"}': "0+300x20",
        },
        0.75,
    ),
    "role:pd_kv_tokens_used:ratio": (
        {
            'pd_kv_tokens{cluster="pd", role="decode", state="protected"}': "30x20",
            'pd_kv_tokens{cluster="pd", role="decode", state="free"}': "50x20",
            'pd_kv_tokens{cluster="pd", role="decode", state="evictable"}': "20x20",
        },
        0.3,
    ),
    "cluster:pd_generation_tokens:rate5m": (
        {'pd_generation_tokens_total{cluster="pd"}': "0+120x20"},
        2.0,
    ),
}


def test_every_rule_has_its_case():
    assert [rule["alert"] for rule in rules("alerts")] == list(ALERTS)
    assert [rule["record"] for rule in rules("recording")] == list(RECORDS)


def test_every_alert_says_what_to_do_and_the_manual_has_it():
    manual = (config_dir().parent / "docs" / "monitoring.md").read_text()
    for rule in rules("alerts"):
        name, notes = rule["alert"], rule["annotations"]
        assert notes["summary"], name
        assert len(notes["runbook"]) > 40, name
        assert notes["runbook_url"] == f"docs/monitoring.md#{name.lower()}"
        assert re.search(rf"^### {name}$", manual, re.MULTILINE), name
        assert rule["labels"]["severity"] in ("page", "ticket"), name


def unit_test(series: dict[str, str], *checks: tuple[str, int, list[float]]) -> dict[str, Any]:
    """`checks`: (expression, minute, values expected, without labels)."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": value} for value in values],
            }
            for expr, minute, values in checks
        ],
    }


@needs_prometheus
def test_every_alert_fires_and_clears_and_every_record_is_right(tmp_path: Path):
    tests = []
    for name, (series, fires, clear) in ALERTS.items():
        firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        tests.append(unit_test(series, (firing, 0, []), (firing, fires, [1]), (firing, clear, [])))
    for name, (series, expected) in RECORDS.items():
        # Rounded, for rates are sums of floats.
        tests.append(unit_test(series, (f"sum(round({name}, 0.0001))", 10, [expected])))
    file = tmp_path / "rules_test.yml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(RULES / "*.yml")],
                "evaluation_interval": "1m",
                "tests": tests,
            }
        )
    )
    promtool("test", "rules", file)


@needs_prometheus
def test_promtool_accepts_configuration_and_rules():
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *sorted(RULES.glob("*.yml")))


def test_ray_is_found_by_the_file_that_ray_writes():
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (found,) = jobs["ray"]["file_sd_configs"]
    assert found["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
    (cluster,) = jobs["pd-cluster"]["static_configs"]
    assert cluster["labels"] == {"cluster": "pd"}
