"""Each worker beside the others of its role."""

from __future__ import annotations

from pd_cluster.observability.dashboards.panels import (
    BYTES_PER_SECOND,
    COUNT,
    RATE,
    SHARE,
    Dashboard,
    Panel,
    Query,
    metric,
    rate,
    ratio,
    total,
)


def used(role: str) -> str:
    this = f'role="{role}"'
    kept = total("pd_kv_tokens", this, 'state!~"free|evictable"', by="worker")
    return f"{kept} / {total('pd_kv_tokens', this, by='worker')}"


def busiest(role: str) -> str:
    running = metric("pd_num_requests_running", f'role="{role}"')
    return ratio(f"max({running})", f"avg({running})")


WORKERS = Dashboard(
    "Workers",
    "Who is there, what each does, and whether the load is even.",
    [
        Panel(
            "Processes",
            COUNT,
            "By role and state. lost: died or hangs; Ray restarts what died. draining: finishes"
            " what it has and goes. Fewer ready ones than asked for: `pd-cluster status`, then the"
            " worker's log.",
            [Query(total("pd_workers", by="role, state"), "{{role}} {{state}}")],
        ),
        Panel(
            "Metrics endpoint",
            COUNT,
            "1: Prometheus reaches the cluster's endpoint. 0: the coordinator is down or its host"
            " cannot be reached, though streams go on; Ray restarts it.",
            [Query(metric("up", 'job="pd-cluster"'), "{{instance}}")],
        ),
        Panel(
            "At work on prefill",
            COUNT,
            "Prompts on each prefill worker. One with far more than the others: its cache attracts"
            " them; the weights of placement: cost say how much that may be.",
            [Query(metric("pd_num_requests_running", 'role="prefill"'), "{{worker}}")],
        ),
        Panel(
            "At work on decode",
            COUNT,
            "Sequences on each decode worker. All at max_running_requests: add decode workers.",
            [Query(metric("pd_num_requests_running", 'role="decode"'), "{{worker}}")],
        ),
        Panel(
            "Waiting on each",
            COUNT,
            "On one worker only: it is slower than the others or hangs; look at its host.",
            [
                Query(
                    metric("pd_num_requests_waiting", 'role=~"prefill|decode"'),
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            "Busiest against mean",
            SHARE,
            "Requests of the busiest worker of a role by the mean: 100 % is even. Above 200 % for"
            " long: placement sees an old picture (Scheduling, index lag), or one prefix draws all",
            [Query(busiest("prefill"), "prefill"), Query(busiest("decode"), "decode")],
        ),
        Panel(
            "Pools in use",
            SHARE,
            "The part of each pool that can be neither given out nor evicted. Near 100 % on decode:"
            " retractions follow; on prefill: prompts wait for pages.",
            [Query(used("prefill"), "{{worker}}"), Query(used("decode"), "{{worker}}")],
        ),
        Panel(
            "Tokens looked up",
            RATE,
            "Prompt tokens per second that each was given: its share of the load. A new worker gets"
            " its part within a minute, or it is not ready.",
            [Query(rate("pd_prefix_cache_queries_total", by="role, worker"), "{{worker}}")],
        ),
        Panel(
            "KV sent by each",
            BYTES_PER_SECOND,
            "One that sends little for its prompts has a slow link, or decode held most of it.",
            [Query(rate("pd_kv_transfer_bytes_total", by="worker"), "{{worker}}")],
        ),
        Panel(
            "Failed transfers of each",
            RATE,
            "Per second. On one worker only: its host's network; on all: the peer that they share.",
            [Query(rate("pd_kv_transfer_failures_total", by="worker"), "{{worker}}")],
        ),
    ],
)
