"""How far the simulator is from a real cluster: one small trace through both.

The engine's steps are measured and fitted to a hardware description. Then conversations are held
with a cluster of one prefill and one decode worker, one core each, over HTTP; and simulated with
that description and the same configuration.
"""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pd_cluster.bench.client import Answer, generate, kv_bytes, server, server_info
from pd_cluster.bench.engine_steps import measure
from pd_cluster.config import Config, load_config
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.simulate.cluster import ClusterShape, Simulation
from pd_cluster.simulate.figures import Slo, figures
from pd_cluster.simulate.fit import fit, mean_deviation
from pd_cluster.simulate.hardware import MODELS, Hardware, ModelShape, StepTimes
from pd_cluster.simulate.trace import ANSWERS, TraceRequest, conversations

CONVERSATIONS = 15
# Before the first trace token id: low ids exist in every vocabulary, the first are control tokens.
FIRST_TOKEN_ID = 256
COMPARED = (
    "output_tps",
    "ttft_p50_s",
    "ttft_p90_s",
    "itl_p50_s",
    "itl_p90_s",
    "cached_part",
    "resident_part",
)


def run(*, count: int = CONVERSATIONS) -> dict[str, float]:
    """`simulation.real.<figure>`, `.simulated.<figure>` and `.ratio.<figure>`, simulated by real;
    `simulation.hardware.<key>`: the description, and how well it fits the engine's steps.
    """
    config = load_config(overrides={"threads": 1, "device": "cpu", "model": "smollm2"})
    model = replace(MODELS["smollm2-135m"], dtype_bytes=4 if config.dtype == "float32" else 2)
    steps = measure(config)
    hardware = fit(model, steps, _start(model))
    trace = conversations(
        count,
        seed=0,
        rate=0.4,
        pause_s=3.0,
        turns=(4, 4),
        system=128,
        message=(30, 200),
        answers=(16, 48),
    )
    real = _replay(trace, model)
    simulated = _simulate(trace, config, StepTimes(hardware, model))
    found = {
        "simulation.fit_deviation_percent": 100 * mean_deviation(hardware, model, steps),
        "simulation.hardware.flops": hardware.flops,
        "simulation.hardware.memory_bandwidth": hardware.memory_bandwidth,
        "simulation.hardware.step_overhead_s": hardware.step_overhead_s,
        "simulation.hardware.nic_bandwidth": hardware.nic_bandwidth,
        "simulation.hardware.nic_latency_s": hardware.nic_latency_s,
    }
    for name in COMPARED:
        found[f"simulation.real.{name}"] = real[name]
        found[f"simulation.simulated.{name}"] = simulated[name]
        found[f"simulation.ratio.{name}"] = simulated[name] / real[name]
    return found


def _start(model: ModelShape) -> Hardware:
    """Where a fit may begin: each worker has a core, which computes or reads weights. Between
    workers of one host pages are copied from memory to memory.
    """
    source = np.ones(16 << 20, np.float32)
    target = np.zeros_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    copied = source.nbytes / statistics.median(times)
    return Hardware(
        flops=50e9,
        memory_bandwidth=copied,
        memory=16e9,
        nic_bandwidth=copied,
        nic_latency_s=1e-3,
        flops_efficiency=1.0,
        memory_efficiency=1.0,
        step_overhead_s=5e-3,
        overlap=0.0,
    )


# --- the real one ---


def _replay(trace: list[TraceRequest], model: ModelShape) -> dict[str, float]:
    """Each conversation in a thread of its own: a turn follows the answer to the one before."""
    first = [number for number, each in enumerate(trace) if each.after is None]
    lines = [
        range(begin, end) for begin, end in pairwise([*first, len(trace)])
    ]  # in the trace, turns stand together
    turns: dict[int, Answer] = {}
    with server(None, threads=1, device="cpu", model="smollm2") as url:
        for prompt in ([9000] * 300, [9001] * 300):  # what is made at first use
            generate(url, prompt, 8)
        _, before = kv_bytes(server_info(url))
        zero = time.perf_counter()
        waits = threading.Event()

        def hold(numbers: range) -> None:
            at = zero + trace[numbers[0]].arrival
            for number in numbers:
                waits.wait(max(0.0, at - time.perf_counter()))
                prompt = _tokens(trace[number], turns)
                turns[number] = generate(url, prompt, trace[number].max_tokens)
                if number + 1 in numbers:
                    at = turns[number].times[-1] + trace[number + 1].arrival

        with ThreadPoolExecutor(len(lines)) as pool:
            list(pool.map(hold, lines))
        _, after = kv_bytes(server_info(url))
    done = [turns[number] for number in range(len(trace))]
    span = max(turn.times[-1] for turn in done) - min(turn.start for turn in done)
    ttft = [turn.first_token_s for turn in done]
    gaps = [later - earlier for turn in done for earlier, later in pairwise(turn.times)]
    prompt_tokens = sum(turn.prompt_len for turn in done)
    return {
        "output_tps": sum(len(turn.tokens) for turn in done) / span,
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p90_s": float(np.quantile(ttft, 0.9)),
        "itl_p50_s": float(np.quantile(gaps, 0.5)),
        "itl_p90_s": float(np.quantile(gaps, 0.9)),
        "cached_part": sum(turn.cached for turn in done) / prompt_tokens,
        "resident_part": (after - before) / model.kv_bytes_per_token / prompt_tokens,
    }


def _tokens(each: TraceRequest, turns: dict[int, Answer]) -> list[int]:
    """A prompt of the model's tokens: where the trace has an answer, what was really answered."""
    tokens: list[int] = []
    for token, length in each.prompt:
        if token >= ANSWERS:
            tokens += turns[token - ANSWERS].tokens
        else:
            tokens += [FIRST_TOKEN_ID + token] * length
    return tokens


# --- the simulated one ---


def _simulate(trace: list[TraceRequest], config: Config, times: StepTimes) -> dict[str, float]:
    shape = ClusterShape(
        prefill=config.prefill,
        decode=config.decode,
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_running=config.max_running_requests,
        chunk_tokens=config.chunked_prefill_size,
        local_tokens=config.local_prefill_size,
        heartbeat_s=config.timeouts.heartbeat_s,
    )
    # The real coordinator's, with what it believes before anything is measured.
    simulation = Simulation(trace, shape, times, Scheduling.of(config))
    simulation.run()
    found = figures(simulation, Slo())
    prompt_tokens = sum(each.prompt_len for each in trace)
    avoided = found["transfer.avoided_bytes"] / times.model.kv_bytes_per_token
    cached = sum(each.sources.cached for each in simulation.requests)
    return {
        "output_tps": found["throughput.output_tokens_ps"],
        "ttft_p50_s": found["ttft.p50_s"],
        "ttft_p90_s": found["ttft.p90_s"],
        "itl_p50_s": found["itl.p50_s"],
        "itl_p90_s": found["itl.p90_s"],
        "cached_part": cached / prompt_tokens,
        "resident_part": avoided / prompt_tokens,
    }


def conclusions(found: dict[str, float]) -> list[str]:
    """The hardware description, as a file for `pd-cluster simulate --hardware`."""
    lines = ["# hardware.yaml: this machine, one core a worker"]
    prefix = "simulation.hardware."
    for name, value in found.items():
        if name.startswith(prefix):
            lines.append(f"{name.removeprefix(prefix)}: {value:.4g}")
    return [*lines, "flops_efficiency: 1", "memory_efficiency: 1", "overlap: 0", "memory: 16e9"]
