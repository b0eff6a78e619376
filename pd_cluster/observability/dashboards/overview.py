"""Is the cluster well, and what do its clients see?"""

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
    quantile,
    rate,
    ratio,
    total,
)


def quantiles(name: str) -> list[Query]:
    return [Query(quantile(each, name), f"p{each * 100:g}") for each in (0.5, 0.95, 0.99)]


OVERVIEW = Dashboard(
    "Overview",
    "What clients see: how many requests, how fast, and how many fail. The others say why.",
    [
        Panel(
            "Workers ready",
            COUNT,
            "Workers of both roles that take work. Fewer than were asked for: see the dashboard"
            " Workers, then the logs of those that are missing.",
            [Query(total("pd_workers", 'state="ready"', 'role!="gateway"'), "ready")],
            width=6,
            as_number=True,
        ),
        Panel(
            "Processes lost",
            COUNT,
            "Workers and gateways that were here and do not answer. Anything but 0: Ray restarts"
            " what died, so one that stays lost hangs, or its host is gone; look at the host.",
            [Query(total("pd_workers", 'state="lost"'), "lost")],
            width=6,
            as_number=True,
        ),
        Panel(
            "Requests that fail",
            SHARE,
            "Of those that end. Above 1 %: the reasons stand in the gateways' logs and under"
            " Admissions refused; a worker that keeps dying shows under Processes lost.",
            [
                Query(
                    ratio(
                        rate("pd_request_total", 'finish_reason="error"'),
                        rate("pd_request_total"),
                    ),
                    "errors",
                )
            ],
            width=6,
            as_number=True,
        ),
        Panel(
            "Prompt tokens not computed",
            SHARE,
            "The part of all prompt tokens that some cache had. When it falls while the traffic is"
            " the same: see Caches for evictions, and whether prompts begin differently each time.",
            [
                Query(
                    "1 - "
                    + ratio(
                        rate("pd_prompt_tokens_by_source_total", 'source="computed"'),
                        rate("pd_prompt_tokens_by_source_total"),
                    ),
                    "cached",
                )
            ],
            width=6,
            as_number=True,
        ),
        Panel(
            "Requests ended",
            REQUESTS_PER_SECOND,
            "By how they ended. Many aborts: clients give up, look at the times beside. Errors: see"
            " the gateways' logs.",
            [Query(rate("pd_request_total", by="finish_reason"), "{{finish_reason}}")],
            stacked=True,
        ),
        Panel(
            "Requests at work and waiting",
            COUNT,
            "As the gateways count them. Waiting that does not go down: more work than workers;"
            " add decode workers if their KV pools are full (Caches), else prefill workers.",
            [
                Query(total("pd_num_requests_running", 'role="gateway"'), "running"),
                Query(total("pd_num_requests_waiting", 'role="gateway"'), "waiting"),
                Query(total("pd_num_requests_retracted"), "of these retracted"),
            ],
        ),
        Panel(
            "Time to first token",
            SECONDS,
            "From arrival, before tokenisation. High: Scheduling says in which stage the time goes;"
            " queue and prefill call for prefill workers, reserve for decode workers.",
            quantiles("pd_time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            SECONDS,
            "Between two steps that gave a request tokens. High p99 only: retractions or recovery."
            " High everywhere: batches are too large, lower max_running_requests or add workers.",
            quantiles("pd_inter_token_latency_seconds"),
        ),
        Panel(
            "Time of a request",
            SECONDS,
            "From arrival to the end: grows with the length of answers. Compare with Tokens.",
            quantiles("pd_e2e_request_latency_seconds"),
        ),
        Panel(
            "Tokens",
            RATE,
            "Per second. Generated tokens that fall while requests wait: decode is held up, look at"
            " retractions (Scheduling) and at each worker.",
            [
                Query(rate("pd_prompt_tokens_total"), "prompt"),
                Query(rate("pd_generation_tokens_total"), "generated"),
            ],
        ),
        Panel(
            "Requests recovered",
            REQUESTS_PER_SECOND,
            "That met a trouble and finished all the same; clients saw only a pause. Many"
            " `worker_lost`: find out why workers die. Many `retracted`: decode's pools are small.",
            [Query(rate("pd_request_recovered_total", by="cause"), "{{cause}}")],
        ),
        Panel(
            "Admissions refused",
            REQUESTS_PER_SECOND,
            "By reason. queue_full, queue_timeout: add workers or lower what clients send."
            " never_fits: clients ask for more than a KV pool holds. no_workers: see Workers.",
            [Query(rate("pd_admission_rejected_total", by="reason"), "{{reason}}")],
        ),
    ],
)
