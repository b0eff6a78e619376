"""The device that is checked, and the shapes and clocks that go with it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median

import torch

from pd_kernels import registry

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def versions() -> dict[str, str]:
    """What was found on this machine; a package that is missing or broken says why."""
    found: dict[str, str] = {"torch": str(torch.__version__)}
    for name in ("triton", "flashinfer", "numpy", "ucxx"):
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except Exception as error:  # a broken package raises what it likes
            found[name] = f"none ({error})"
    found["device"] = torch.cuda.get_device_name(0) if ON_GPU else "cpu (Triton interpreted)"
    return found


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Ops on `DEVICE` run as on a GPU: on the CPU too they are Triton's."""
    if ON_GPU:
        yield
        return
    with registry.preferring("cpu", "triton"):
        yield


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


@cache
def _flush() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)


def seconds(call: Callable[[], object], *, rounds: int = 20, flush: bool = True) -> float:
    """The median of some rounds, by the device's own clock; with `flush` its caches are cold."""
    if not ON_GPU:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(rounds):
        if flush:
            _flush().zero_()
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return median(times)
