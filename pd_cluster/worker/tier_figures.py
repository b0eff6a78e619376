"""What a worker tells of the tiers below its KV pool."""

from __future__ import annotations

from typing import Any

from pd_cluster.cache.tiers import TieredCache


def tier_figures(tiers: TieredCache | None, page_bytes: int) -> dict[str, Any]:
    """Fields of WorkerSnapshot; none where there are no tiers."""
    if tiers is None:
        return {}
    size = tiers.page_size
    counts, totals = tiers.host.counts(), tiers.tier_statistics()
    loaded = {"host": totals.host_loaded, "disk": totals.storage_loaded}
    stored = {"host": totals.backed_up, "disk": totals.stored}
    return {
        "host_tokens": {
            "free": counts.free * size,
            "private": counts.private * size,
            "protected": counts.protected * size,
            "evictable": counts.evictable * size,
            "inflight": counts.in_flight * size,
        },
        "tier_loaded_tokens": loaded,
        "tier_loaded_bytes": {tier: n // size * page_bytes for tier, n in loaded.items()},
        "tier_stored_tokens": stored,
        "tier_stored_bytes": {tier: n // size * page_bytes for tier, n in stored.items()},
        "tier_skipped_tokens": totals.backups_skipped,
        "tier_errors": totals.errors,
    }
