"""Loading the backends ahead, and saying which one is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pd_kernels.decode_attention import DECODE_ATTENTION
from pd_kernels.page_write import PAGE_WRITE
from pd_kernels.prefill_attention import PREFILL_ATTENTION
from pd_kernels.registry import Op
from pd_kernels.rms_norm import FUSED_ADD_RMS_NORM, RMS_NORM
from pd_kernels.rope import ROPE
from pd_kernels.silu_and_mul import SILU_AND_MUL

# page_gather and filter_probabilities are not among them: on the CPU they are torch's own.
OPS: tuple[Op[Callable[..., Any]], ...] = (
    DECODE_ATTENTION,
    FUSED_ADD_RMS_NORM,
    PAGE_WRITE,
    PREFILL_ATTENTION,
    RMS_NORM,
    ROPE,
    SILU_AND_MUL,
)


def backend_name(device: torch.device | str = "cpu") -> str:
    """The backend of the ops on `device`: "cpu" is compiled, "torch" the plain reference.

    Loads it if need be. Where ops differ, their names are joined by "+".
    """
    kind = torch.device(device).type
    return "+".join(sorted({op.backend(kind) for op in OPS}))


def warm_up(device: torch.device | str = "cpu") -> str:
    """Compiles (the first time on a machine: some seconds) and loads the backend of `device`, so
    that no request waits for it. Returns a line on what is in use, e.g. for a log."""
    name = backend_name(device)
    if torch.device(device).type != "cpu":
        return f"{name} kernels on {device}"
    threads = torch.get_num_threads()
    return f"{name} kernels ({torch.backends.cpu.get_cpu_capability()}), {threads} threads"
