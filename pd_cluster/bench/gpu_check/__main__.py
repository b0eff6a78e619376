"""Runs the parts, each in a process of its own that is ended when its time is over."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pd_cluster.bench.gpu_check.results import Result, figures, table

# Seconds for each part; together under eight minutes.
PARTS = {"kernels": 200, "model": 90, "transfer": 70, "measures": 110}
_MARK = "result: "


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there, as one flat object")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return _run_part(options.run)
    begin = time.monotonic()
    found: dict[str, str] = {}
    results: list[Result] = []
    for name in options.part or PARTS:
        part_found, part_results = _part(name)
        found |= part_found
        results += part_results
    print("\n".join(f"{name}: {what}" for name, what in found.items()))
    print(table(results))
    failed = [each.name for each in results if each.status == "FAILED"]
    print(f"{len(results)} results, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    if options.json is not None:
        flat = figures(results) | {f"gpu.found.{name}": what for name, what in found.items()}
        options.json.write_text(json.dumps(flat, indent=1) + "\n")
    return 1 if failed else 0


def _part(name: str) -> tuple[dict[str, str], list[Result]]:
    """One part's results, also those from before it ran out of time or died."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pd_cluster.bench.gpu_check", "--run", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = ""
    try:
        output, _ = process.communicate(timeout=PARTS[name])
        if process.returncode:
            end = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        end = f"not over after {PARTS[name]} s"
    lines = output.splitlines()
    messages = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    found = {
        key: what for each in messages if "found" in each for key, what in each["found"].items()
    }
    results = [Result(**each) for each in messages if "found" not in each]
    if end:
        last = " | ".join(line for line in lines if not line.startswith(_MARK))[-500:]
        results.append(Result(name, "FAILED", detail=f"{end}: {last}"))
    return found, results


def _run_part(name: str) -> int:
    # Triton reads it when it is first imported.
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    machine = importlib.import_module("pd_cluster.bench.gpu_check.machine")
    _tell({"found": machine.versions()})
    part = importlib.import_module(f"pd_cluster.bench.gpu_check.{name}")
    part.run(lambda result: _tell(asdict(result)))
    return 0


def _tell(message: dict[str, object]) -> None:
    print(_MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
