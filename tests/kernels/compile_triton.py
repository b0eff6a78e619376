"""Compiles every Triton kernel for a GPU of compute capability 9.0, which takes no GPU.

Run as a script, without Triton's interpreter: the ops run as they would, on tensors of the CPU, but
their launches only compile. Prints a line for each kernel: its name and bytes of shared memory.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import pd_kernels
from pd_kernels import registry
from pd_kernels.triton_kernels import decode_attention

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
seen: set[str] = set()


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    names = [parameter.name for parameter in self.params]
    given = dict(zip(names, args, strict=False))
    given |= {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    constants = {each.name: given[each.name] for each in self.params if each.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else _type(value) for name, value in given.items()
    }
    key = f"{self.__name__} {signature} {constants}"
    if key in seen:
        return
    seen.add(key)
    source = ASTSource(fn=self, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGET, options=kwargs)
    assert compiled.asm["cubin"]
    print(f"{self.fn.__module__}.{self.__name__}", compiled.metadata.shared, flush=True)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def run_all(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    def rand(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, weight = rand(2, 4096), rand(4096)
    pd_kernels.rms_norm(x, weight, 1e-5)
    pd_kernels.fused_add_rms_norm(x, x.clone(), weight, 1e-5)
    pd_kernels.silu_and_mul(x)
    q, k = rand(2, heads, dim), rand(2, kv_heads, dim)
    pd_kernels.rope(q, k, torch.zeros(2, dtype=torch.int64), torch.zeros(9, dim))
    pool = rand(3, 2, 2, page_size, kv_heads, dim)
    k_pages, v_pages = pool[:, 1].unbind(1)
    pd_kernels.page_write(k, k, k_pages, v_pages, torch.zeros(2, dtype=torch.int64))
    chosen = torch.zeros(2, dtype=torch.int32)
    pd_kernels.page_scatter(pool, chosen, pd_kernels.page_gather(pool, chosen))
    bounds, table = torch.arange(3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    lens = torch.ones(2, dtype=torch.int32)
    pd_kernels.decode_attention(q, k_pages, v_pages, bounds, table, lens, 0.1)
    # So many sequences that contexts are not split.
    many = torch.arange(65, dtype=torch.int32)
    queries, ones = rand(64, heads, dim), torch.ones(64, dtype=torch.int32)
    pd_kernels.decode_attention(queries, k_pages, v_pages, many, table, ones, 0.1)
    pd_kernels.prefill_attention(q, k_pages, v_pages, bounds, bounds, table, lens, 0.1)
    filters = torch.zeros(2), torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64)
    pd_kernels.filter_probabilities(torch.rand(2, 20_000), *filters)


if __name__ == "__main__":
    JITFunction.run = compile_only
    decode_attention.multiprocessors = lambda tensor: 132
    with registry.preferring("cpu", "triton"):
        for dtype in sys.argv[1:]:
            run_all(getattr(torch, dtype), heads=32, kv_heads=8, dim=128, page_size=16)
