"""The KV that moves from prefill to decode, and what did not have to."""

from __future__ import annotations

from pd_cluster.observability.dashboards.panels import (
    BYTES,
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
)

TRANSFERS = Dashboard(
    "Transfers",
    "KV pages between workers.",
    [
        Panel(
            "KV moved",
            BYTES_PER_SECOND,
            "By the worker that sends. Near the link's limit: prefer placements near each other, or"
            " let decode compute short tails (placement: cost).",
            [Query(rate("pd_kv_transfer_bytes_total", by="worker"), "{{worker}}")],
        ),
        Panel(
            "KV that did not move",
            BYTES_PER_SECOND,
            "Decode held it already. Falls when decode evicts (Caches), or when conversations no"
            " longer return to the worker that knows them.",
            [Query(rate("pd_kv_transfer_avoided_bytes_total", by="worker"), "{{worker}}")],
        ),
        Panel(
            "Part that did not move",
            SHARE,
            "Of all KV that decode needed. Low with conversations of many turns: use placement:"
            " cost, which looks at decode's caches too.",
            [
                Query(
                    ratio(
                        rate("pd_kv_transfer_avoided_bytes_total"),
                        f"({rate('pd_kv_transfer_avoided_bytes_total')}"
                        f" + {rate('pd_kv_transfer_bytes_total')})",
                    ),
                    "avoided",
                )
            ],
        ),
        Panel(
            "Time of a transfer",
            SECONDS,
            "From its start to the peer's acknowledgement. High: compare with the bytes; a few slow"
            " bytes mean a peer whose process is starved, or a wrong device (UCX_NET_DEVICES).",
            [
                Query(quantile(share, "pd_kv_transfer_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ],
        ),
        Panel(
            "Wait for the last page",
            SECONDS,
            "After the first token, until decoding can go on: what transfers cost a request. High"
            " while transfers are fast: chunks are large, lower chunked_prefill_size.",
            [
                Query(
                    quantile(share, "pd_request_stage_seconds", 'stage="transfer"'),
                    f"p{share * 100:g}",
                )
                for share in (0.5, 0.95, 0.99)
            ],
        ),
        Panel(
            "Transfers in flight",
            COUNT,
            "Attempts whose pages are moving. Not 0 when the cluster is idle: a peer hangs; its"
            " pages stay quarantined until it answers or is known dead.",
            [Query(metric("pd_num_transfers_inflight"), "{{worker}}")],
        ),
        Panel(
            "Transfers failed",
            RATE,
            "Per second and reason. `peer lost` comes with a dead worker and ends with it. Others"
            " point to the network: UCX's log on both sides (UCX_LOG_LEVEL=info).",
            [Query(rate("pd_kv_transfer_failures_total", by="reason"), "{{reason}}")],
        ),
        Panel(
            "Descriptors",
            RATE,
            "Pieces per second: runs of pages count one. Many and small: pools are fragmented, use"
            " a larger page_size.",
            [Query(rate("pd_kv_transfer_descriptors_total", by="worker"), "{{worker}}")],
        ),
        Panel(
            "Size of a piece",
            BYTES,
            "Bytes for each descriptor. Below 64 KiB a network is not used well: use a larger"
            " page_size.",
            [
                Query(
                    ratio(
                        rate("pd_kv_transfer_bytes_total"),
                        rate("pd_kv_transfer_descriptors_total"),
                    ),
                    "mean",
                )
            ],
        ),
    ],
)
