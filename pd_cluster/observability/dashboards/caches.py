"""What the KV pools hold, how often it is found again, and what becomes of the rest."""

from __future__ import annotations

from pd_cluster.observability.dashboards.panels import (
    BYTES_PER_SECOND,
    COUNT,
    RATE,
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

CACHES = Dashboard(
    "Caches",
    "The prefix caches of both sides and the tiers below them.",
    [
        Panel(
            "Where prompt tokens came from",
            RATE,
            "Per second, each token once. Mostly `computed` although prompts repeat: their"
            " beginnings differ (a date, a request's id), or they are evicted too soon.",
            [Query(rate("pd_prompt_tokens_by_source_total", by="source"), "{{source}}")],
            stacked=True,
        ),
        Panel(
            "Hit rate",
            SHARE,
            "Tokens found of those looked up, over the last minute that had any. One worker far"
            " below the others of its role: it is new, or placement does not see its cache"
            " (Scheduling, index lag).",
            [Query(metric("pd_prefix_cache_hit_rate"), "{{worker}}")],
        ),
        Panel(
            "Tokens in prefill's pools",
            COUNT,
            "By state. No evictable and no free ones for long: prompts wait for pages; add prefill"
            " workers or a larger max_total_tokens. private or inflight when idle: a leak, report"
            " it.",
            [
                Query(
                    total("pd_kv_tokens", 'role="prefill"', by="state"),
                    "{{state}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Tokens in decode's pools",
            COUNT,
            "By state. protected near all: answers grow into nothing and sequences are retracted;"
            " add decode workers, or lower max_running_requests.",
            [Query(total("pd_kv_tokens", 'role="decode"', by="state"), "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Lookups and hits",
            RATE,
            "Tokens per second. Hits that fall while lookups stay: see Evicted tokens.",
            [
                Query(rate("pd_prefix_cache_queries_total", by="role"), "{{role}} looked up"),
                Query(rate("pd_prefix_cache_hits_total", by="role"), "{{role}} found"),
            ],
        ),
        Panel(
            "Evicted tokens",
            RATE,
            "Per second. As many as are computed: the working set exceeds the pools; enlarge"
            " max_total_tokens, or keep more below (enable_hierarchical_cache).",
            [Query(rate("pd_evicted_tokens_total", by="role, worker"), "{{worker}}")],
        ),
        Panel(
            "Time of an eviction",
            SECONDS,
            "It holds up a step. Above some milliseconds: write_back copies while it evicts; choose"
            " write_through, or evict less.",
            [
                Query(quantile(0.5, "pd_eviction_seconds", by="role"), "{{role}} p50"),
                Query(quantile(0.99, "pd_eviction_seconds", by="role"), "{{role}} p99"),
            ],
        ),
        Panel(
            "Tokens in host memory",
            COUNT,
            "By state, where there is a host tier. No free ones is as it should be; nothing"
            " evictable means all is being copied: host memory is too small.",
            [Query(total("pd_tier_tokens", by="state"), "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Loaded from lower tiers",
            BYTES_PER_SECOND,
            "KV that did not have to be computed. None while prompts repeat and are evicted: the"
            " tiers are slower than computing, or too small.",
            [Query(rate("pd_tier_loaded_bytes_total", by="tier"), "{{tier}}")],
        ),
        Panel(
            "Written to lower tiers",
            BYTES_PER_SECOND,
            "Far more than is loaded: most of it is of no use, choose write_through_selective.",
            [Query(rate("pd_tier_stored_bytes_total", by="tier"), "{{tier}}")],
        ),
        Panel(
            "Tokens up and down",
            RATE,
            "Per second, between the pools and the tiers below. More go down than ever come up: a"
            " selective write policy keeps only what is used twice.",
            [
                Query(rate("pd_tier_loaded_tokens_total", by="tier"), "{{tier}} up"),
                Query(rate("pd_tier_stored_tokens_total", by="tier"), "{{tier}} down"),
            ],
        ),
        Panel(
            "Hits of lower tiers",
            SHARE,
            "The part of prompt tokens that came from host memory or storage. Compare with what the"
            " tiers cost; where it stays near 0, save their memory.",
            [
                Query(
                    ratio(
                        rate("pd_prompt_tokens_by_source_total", f'source="{tier}_hit"'),
                        rate("pd_prompt_tokens_by_source_total"),
                    ),
                    tier,
                )
                for tier in ("host", "disk")
            ],
        ),
        Panel(
            "Not kept, and failed",
            RATE,
            "Tokens per second that found no room below, and operations that failed. Failures:"
            " storage is full or cannot be reached; the workers' logs name it.",
            [
                Query(rate("pd_tier_skipped_tokens_total"), "tokens skipped"),
                Query(rate("pd_tier_errors_total"), "operations failed"),
            ],
        ),
    ],
)
