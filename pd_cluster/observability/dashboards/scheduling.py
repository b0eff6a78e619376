"""Where requests wait, where they are sent, and what is taken back."""

from __future__ import annotations

from pd_cluster.observability.dashboards.panels import (
    COUNT,
    RATE,
    REQUESTS_PER_SECOND,
    SECONDS,
    SHARE,
    Dashboard,
    Panel,
    Query,
    metric,
    quantile,
    rate,
    ratio,
    total,
)

SCHEDULING = Dashboard(
    "Scheduling",
    "The coordinator's decisions, and what the stages of a request cost.",
    [
        Panel(
            "Time in each stage",
            SECONDS,
            "95th percentile. queue: no worker had room. reserve: decode waited for a prefix on its"
            " way, or for pages. prefill: prefill's queue and computing. transfer: see"
            " Transfers. tokenize: gateways are short of CPU, start more.",
            [Query(quantile(0.95, "pd_request_stage_seconds", by="stage"), "{{stage}}")],
        ),
        Panel(
            "Waiting",
            COUNT,
            "By who they wait at. At the coordinator: no room anywhere. At prefill: more prefill"
            " workers. At decode: a prefix is on its way, that passes by itself.",
            [Query(total("pd_num_requests_waiting", by="role"), "{{role}}")],
        ),
        Panel(
            "Placements",
            REQUESTS_PER_SECOND,
            "By route. Placement by cost also pulls answers from decode (remote+pull) and has short"
            " tails computed there (local); the simpler policies only know remote.",
            [Query(rate("pd_placements_total", by="route"), "{{route}}")],
            stacked=True,
        ),
        Panel(
            "Attempts ended",
            REQUESTS_PER_SECOND,
            "By outcome. refused: the coordinator's picture of decode's memory is late. failed:"
            " workers or transfers fail, see their logs. Both are tried again.",
            [Query(rate("pd_attempts_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        Panel(
            "Retractions",
            RATE,
            "Per second, by why a sequence was taken back. Steady ones waste work: raise"
            " schedule_conservativeness, enlarge max_total_tokens or add decode workers.",
            [Query(rate("pd_retractions_total", by="policy"), "{{policy}}")],
        ),
        Panel(
            "Retracted tokens",
            RATE,
            "KV given up per second. What stays in decode's cache comes back as a hit; near as many"
            " computed again (Caches) means that it is evicted first.",
            [Query(rate("pd_retracted_tokens_total", by="worker"), "{{worker}}")],
        ),
        Panel(
            "Attempts for a request",
            SHARE,
            "Placements for each request that ended: 100 % is one each. Far above: requests go"
            " around, see Attempts ended for why.",
            [Query(ratio(rate("pd_placements_total"), rate("pd_request_total")), "attempts")],
        ),
        Panel(
            "Refused",
            REQUESTS_PER_SECOND,
            "Admissions refused, by reason. tenant_queue_full concerns one tenant; the others mean"
            " too few workers, or deadlines that are too tight.",
            [Query(rate("pd_admission_rejected_total", by="reason"), "{{reason}}")],
        ),
        Panel(
            "Placements on trial",
            COUNT,
            "Attempts that hold a placement. Stays above what gateways run: gateways died with"
            " requests; leases end by themselves.",
            [Query(metric("pd_num_requests_running", 'role="coordinator"'), "placed")],
        ),
        Panel(
            "Leases that expired",
            RATE,
            "Placements per second that no worker's report confirmed in time. Steady ones: reports"
            " come late, workers are starved of CPU or the coordinator is.",
            [Query(rate("pd_leases_expired_total"), "expired")],
        ),
        Panel(
            "Lag of the prefix index",
            SECONDS,
            "How late the coordinator hears what a cache holds. Above a second placement works with"
            " an old picture: the coordinator is busy or restarts. Constant growth when idle ends"
            " with the next request.",
            [Query(metric("pd_prefix_index_lag_seconds"), "{{worker}}")],
        ),
    ],
)
