"""Whole simulations of small clusters: the real schedulers come to rest, and figures add up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pd_cluster.coordinator.choice import RouteLimits
from pd_cluster.coordinator.index import PrefixIndex
from pd_cluster.coordinator.settings import Scheduling
from pd_cluster.errors import ConfigError
from pd_cluster.simulate.cluster import ClusterShape, Simulation, priors
from pd_cluster.simulate.command import Options, simulate
from pd_cluster.simulate.figures import Slo, figures
from pd_cluster.simulate.hardware import HARDWARE, MODELS, StepTimes
from pd_cluster.simulate.placing import placement_seconds
from pd_cluster.simulate.runs import Experiment, check, plan
from pd_cluster.simulate.trace import TraceRequest, conversations, read_trace

TIMES = StepTimes(HARDWARE["h100"], MODELS["llama-3.1-8b"])
SHAPE = ClusterShape(prefill=2, decode=2, num_pages=2000, page_size=16)


def run(
    trace: list[TraceRequest], shape: ClusterShape = SHAPE, placement: str = "cost"
) -> Simulation:
    scheduling = Scheduling(placement=placement, priors=priors(TIMES))
    simulation = Simulation(trace, shape, TIMES, scheduling)
    simulation.run()
    return simulation


def settle(simulation: Simulation) -> None:
    """Invariants 1 and 6 at the end, on every worker."""
    simulation.state.validate()
    for worker in simulation.workers.values():
        worker.scheduler.validate()
        assert worker.scheduler.idle
    for request in simulation.requests:
        sources = request.sources
        assert sources.cached <= request.trace.prompt_len - 1
        assert sources.computed + sources.cached == request.trace.prompt_len


def groups(path: Path, seed: int = 0, count: int = 60) -> Path:
    """A small trace in Mooncake's format: six prefixes of eight blocks, tails of one to four."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            head = 8 * rng.randrange(6)
            tail = [100 + 10 * number + i for i in range(rng.randint(1, 4))]
            ids = [head + i for i in range(8)] + tail
            record = {
                "timestamp": 200 * number,
                "input_length": 512 * len(ids) - rng.randrange(512),
                "output_length": rng.randint(1, 40),
                "hash_ids": ids,
            }
            file.write(json.dumps(record) + "\n")
    return path


def test_every_request_is_served_and_every_account_adds_up() -> None:
    trace = conversations(20, seed=3, rate=4.0, pause_s=1.0)
    simulation = run(trace)
    settle(simulation)
    assert [request.tokens for request in simulation.requests] == [r.max_tokens for r in trace]
    found = figures(simulation, Slo())
    assert found["requests"] == len(trace)
    assert found["goodput_rps"] <= found["throughput.requests_ps"]
    # Case 20: a request that waits is looked up once on each side, however often it is tried.
    for role in ("prefill", "decode"):
        looked_up = sum(
            worker.cache.statistics().queries
            for worker in simulation.workers.values()
            if worker.role == role
        )
        prompts = sum(request.prompt_len for request in trace)
        assert looked_up <= prompts if role == "prefill" else looked_up == prompts
    routes = sum(value for name, value in found.items() if name.startswith("route."))
    assert routes == found["attempts"] >= len(trace)
    assert len(simulation.gaps) == sum(r.max_tokens - 1 for r in trace)
    assert all(gap > 0 for gap in simulation.gaps)
    for request in simulation.requests:
        after = request.trace.after
        if after is not None:
            assert request.arrival > simulation.requests[after].last_token


def test_a_simulation_is_the_same_every_time() -> None:
    trace = conversations(8, seed=1, rate=4.0)
    assert figures(run(trace), Slo()) == figures(run(trace), Slo())


def test_the_other_routes_save_computing_and_moving() -> None:
    """Turns contain answers that only decode holds."""
    trace = conversations(15, seed=5, rate=2.0, pause_s=2.0)
    # Memory enough that what decode holds is still there when the next turn comes.
    experiment = Experiment(trace, replace(SHAPE, num_pages=8000), TIMES)
    with_routes = experiment.run("cost")
    without = replace(experiment, limits=RouteLimits()).run("cost")
    assert with_routes["route.local"] > 0
    assert with_routes["prefill.computed_tokens"] < without["prefill.computed_tokens"]
    assert with_routes["ttft.p50_s"] < without["ttft.p50_s"]
    assert with_routes["itl.p99_s"] < experiment.slo.itl_s
    pulled = replace(experiment, limits=RouteLimits(pull=True)).run("cost")
    assert pulled["prefill.pulled_tokens"] > 0
    assert pulled["prefill.computed_tokens"] < without["prefill.computed_tokens"]


def test_a_host_tier_is_placed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pools too small have evicted is read where it lies, for the coordinator knows where."""
    trace = conversations(25, seed=2, rate=1.0, pause_s=4.0)
    experiment = Experiment(trace, replace(SHAPE, num_pages=2500), TIMES)
    without = experiment.run("cost")
    experiment = replace(experiment, shape=replace(experiment.shape, host_pages=12_000))
    known = experiment.run("cost")
    monkeypatch.setattr(PrefixIndex, "match_below", lambda *_: None)
    unknown = experiment.run("cost")
    assert "host.hit_rate" not in without
    assert known["host.hit_rate"] > unknown["host.hit_rate"] > 0
    assert known["host.loaded_bytes"] > 0
    computed = [each["prefill.computed_tokens"] for each in (known, unknown, without)]
    assert computed[0] < 0.8 * computed[1] < 0.8 * computed[2]
    assert known["transfer.bytes"] < unknown["transfer.bytes"]


def test_memory_for_a_third_of_the_demand_is_enough_with_retractions() -> None:
    """Case 15: what was retracted resumes, is not lost, and has every token."""
    trace = [
        TraceRequest(0.01 * n, ((n, 300),), max_tokens=700, answer_token=1000 + n)
        for n in range(12)
    ]
    shape = ClusterShape(prefill=1, decode=1, num_pages=256, page_size=16)  # of 750 needed
    simulation = run(trace, shape, placement="least_loaded")
    settle(simulation)
    found = figures(simulation, Slo())
    assert found["retractions"] > 0
    assert [request.tokens for request in simulation.requests] == [700] * 12


def test_a_request_that_can_never_fit_is_rejected_and_the_others_are_served() -> None:
    trace = [
        TraceRequest(0.0, ((1, 40_000),), max_tokens=1, answer_token=1000),
        TraceRequest(0.1, ((2, 100),), max_tokens=3, answer_token=1001),
    ]
    simulation = run(trace)
    assert simulation.requests[0].rejected == "never_fits"
    assert simulation.requests[1].tokens == 3
    found = figures(simulation, Slo())
    assert (found["requests"], found["rejected"]) == (2, 1)


def test_placement_by_cost_finds_prefixes_that_others_miss(tmp_path: Path) -> None:
    trace = read_trace(groups(tmp_path / "trace.jsonl"))
    shape = ClusterShape(prefill=3, decode=3, num_pages=60, page_size=512)
    experiment = Experiment(trace, shape, TIMES)
    found, targets = check(experiment)
    assert found["cost.prefill.hit_rate"] > 1.2 * found["least_loaded.prefill.hit_rate"]
    assert found["cost.transfer.bytes"] < found["prefix_prefill_only.transfer.bytes"]
    names = [target.name for target in targets]
    assert names[:2] == ["prefill.hit_rate", "prefill.imbalance"]
    assert all(str(target).startswith("met" if target.met else "MISSED") for target in targets)


def test_a_plan_is_the_smallest_that_meets_the_slo() -> None:
    trace = [
        TraceRequest(0.05 * n, ((n, 4000),), max_tokens=100, answer_token=10_000 + n)
        for n in range(60)
    ]
    shape = ClusterShape(prefill=1, decode=4, num_pages=1000, page_size=512)
    slo = Slo(ttft_s=0.5, itl_s=0.02)
    experiment = Experiment(trace, shape, TIMES, slo)
    prefill, decode, found = plan(experiment)
    assert found["ttft.p99_s"] <= slo.ttft_s
    assert found["itl.p99_s"] <= slo.itl_s
    assert prefill + decode > 2
    if prefill > 1:
        fewer = replace(experiment, shape=replace(shape, prefill=prefill - 1, decode=decode))
        assert fewer.run("cost")["ttft.p99_s"] > slo.ttft_s


# --- the command ---


def test_the_command_writes_figures_and_its_exit_code_says_whether_targets_were_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = groups(tmp_path / "trace.jsonl")
    out = tmp_path / "figures.json"
    options = Options(trace=trace, prefill=2, decode=2, pages=100, json_file=out)
    assert simulate(options) == 0
    figures_ = json.loads(out.read_text())
    assert 0 < figures_["prefill.hit_rate"] < 1
    assert "prefill.hit_rate" in capsys.readouterr().out
    # One worker of each: nothing can be placed better, so no byte is saved, and that is a miss.
    missed = replace(options, prefill=1, decode=1, check=True)
    assert simulate(missed) == 1
    assert "MISSED: transfer.bytes" in capsys.readouterr().out
    compared = replace(options, compare="cost,random")
    assert simulate(compared) == 0
    assert {name.split(".")[0] for name in json.loads(out.read_text())} == {"cost", "random"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": "best"}, "unknown placement 'best'"),
        ({"compare": "cost,best"}, "unknown placement 'best'"),
        ({"routes": "local"}, "'remote' and any of"),
        ({"hardware": "b300"}, "unknown hardware"),
        ({"trace": Path("missing.jsonl")}, "missing.jsonl"),
        ({"schedule_policy": "best"}, "--schedule-policy: unknown schedule policy 'best'"),
        ({"compare": "cost", "plan": True}, "--plan and --compare: .* give one"),
        ({"decode": 0}, "--decode 0: must be at least 1"),
        ({"host_pages": -1}, "--host-pages -1: must not be negative"),
        ({"rate": 2}, "are of a --trace"),
        ({"page_size": 48}, "--page-size 48: must divide 64 or be larger"),
        ({"page_size": 10**9}, "leaves no memory for a page"),
    ],
)
def test_bad_options_are_errors_that_name_them(changes: dict[str, object], message: str) -> None:
    options = replace(Options(num_conversations=1), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        simulate(options)


def test_the_routes_are_judged_on_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(
        num_conversations=10, page_size=16, pages=4000, prefill=2, decode=2, check=True
    )
    assert simulate(options) == 0
    printed = capsys.readouterr().out
    assert "met: prefill.computed_tokens (remote's alone)" in printed
    assert "all_routes" in printed


def test_placing_is_timed_by_the_number_of_workers() -> None:
    ticks = iter(range(10**6))
    found = placement_seconds(lambda: float(next(ticks)), workers=(2, 4), count=5)
    assert found == {
        f"placement.{number}.{name}_s": 1.0 for number in (2, 4) for name in ("p50", "p99")
    }
