"""Our calls against the signatures of the flashinfer that is installed, where one is."""

from __future__ import annotations

import inspect
import warnings
from functools import reduce
from types import ModuleType

import pytest
import torch

import pd_kernels
from pd_kernels import AttentionHeads, paged_attention, registry
from tests.kernels.fake_flashinfer import FakeFlashinfer
from tests.kernels.test_flashinfer_attention import Tables

pytest.importorskip("triton", reason="the extra `gpu` is not installed")


@pytest.fixture
def flashinfer() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer", reason="flashinfer is not installed")


def test_every_call_fits(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashinfer()
    monkeypatch.setattr("pd_kernels.flashinfer_kernels.working", lambda: fake)
    with registry.preferring("cpu", "flashinfer", "triton"):
        _call_all()
    assert len(set(fake.names())) == 13
    for name, args, kwargs in fake.calls:
        real = reduce(getattr, name.split("."), flashinfer)
        inspect.signature(real).bind(*args, **kwargs)


def _call_all() -> None:
    x, weight = torch.ones(2, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    pd_kernels.rms_norm(x, weight, 1e-5)
    pd_kernels.fused_add_rms_norm(x, x.clone(), weight, 1e-5)
    pd_kernels.silu_and_mul(x)
    heads, table = x.view(2, 2, 64), torch.ones(9, 64)
    pd_kernels.rope(heads, heads.clone(), torch.tensor([1, 8]), table)
    none, all_of_them = torch.zeros(2), torch.full((2,), 8, dtype=torch.int32)
    pd_kernels.filter_probabilities(torch.rand(2, 8), none, all_of_them, none.double() + 0.5)
    shape = AttentionHeads(2, 2, 64, 0.125, torch.bfloat16, torch.device("cpu"))
    attention = paged_attention(shape)  # which tries a step that decodes and prefills
    ones, bounds = torch.ones(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    tables = Tables(torch.tensor([-1]), bounds, bounds, ones - 1, ones, 1)
    planned = attention.captured(tables, heads.new_zeros(1, 1, 2, 64))
    planned.plan(tables)
    planned.attend(heads[:1], *heads.new_zeros(2, 1, 1, 2, 64))
