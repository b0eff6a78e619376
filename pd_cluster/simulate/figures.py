"""What a simulation showed: one flat dictionary of figures by dotted names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd_cluster.simulate.cluster import Simulation

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good: first token, and mean time between tokens."""

    ttft_s: float = 2.0
    itl_s: float = 0.05


def figures(simulation: Simulation, slo: Slo) -> Figures:
    """Times are seconds, sizes bytes; hit rates are parts of all prompt tokens."""
    served = [request for request in simulation.requests if not request.rejected]
    assert served, "nothing was served"
    prompt = sum(request.trace.prompt_len for request in served)
    ttft = np.array([request.first_token - request.arrival for request in served])
    gaps = np.frombuffer(simulation.gaps, np.float64) if simulation.gaps else np.zeros(1)
    span = max(request.last_token for request in served) - min(r.arrival for r in served)
    mean_itl = np.array(
        [(r.last_token - r.first_token) / max(1, r.tokens - 1) for r in served]
    )  # fmt: skip
    good = int(((ttft <= slo.ttft_s) & (mean_itl <= slo.itl_s)).sum())
    prefill = [worker for worker in simulation.workers.values() if worker.role == "prefill"]
    decode = [worker for worker in simulation.workers.values() if worker.role == "decode"]
    page_bytes = prefill[0].page_bytes
    out: Figures = {
        "requests": len(simulation.requests),
        "rejected": len(simulation.requests) - len(served),
        "attempts": sum(request.attempts for request in served),
        "retractions": sum(worker.scheduler.decode.retractions.total() for worker in decode),
        "throughput.requests_ps": len(served) / span,
        "throughput.output_tokens_ps": sum(request.tokens for request in served) / span,
        "goodput_rps": good / span,
        "prefill.hit_rate": sum(request.sources.prefill_hit for request in served) / prompt,
        "prefill.computed_tokens": sum(request.sources.computed for request in served),
        "prefill.pulled_tokens": sum(request.sources.pulled for request in served),
        "prefill.imbalance": _imbalance([worker.busy_s for worker in prefill]),
        "prefill.utilisation": float(np.mean([worker.busy_s for worker in prefill])) / span,
        "decode.resident_rate": sum(request.resident for request in served) / prompt,
        "decode.imbalance": _imbalance([worker.busy_s for worker in decode]),
        "transfer.bytes": sum(worker.written_bytes for worker in prefill),
        "transfer.pulled_bytes": sum(worker.pulled_bytes for worker in prefill),
        "transfer.avoided_bytes": page_bytes
        * sum(worker.scheduler.decode.resident_pages for worker in decode),
    }
    if simulation.shape.host_pages:
        loaded = sum(worker.host_loaded_tokens for worker in simulation.workers.values())
        out["host.hit_rate"] = sum(request.sources.host_hit for request in served) / prompt
        out["host.loaded_bytes"] = loaded * prefill[0].times.model.kv_bytes_per_token
    for name, values in (("ttft", ttft), ("itl", gaps)):
        for percent in (50, 90, 99):
            out[f"{name}.p{percent}_s"] = float(np.quantile(values, percent / 100))
    for route, count in sorted(simulation.state.statistics.routes.items()):
        out[f"route.{route}"] = count
    return out


def _imbalance(busy: Sequence[float]) -> float:
    """Busiest over mean."""
    mean = float(np.mean(busy))
    return max(busy) / mean if mean else 1.0
