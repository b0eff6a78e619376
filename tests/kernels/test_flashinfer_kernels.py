"""What flashinfer is given, and what it is not; a stand-in computes as its documentation says.

Its own kernels run only on a GPU: there `scripts/gpu_check` compares them with the references.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import pd_kernels
from pd_kernels import flashinfer_kernels, registry
from pd_kernels.registry import BackendUnavailable
from tests.kernels.fake_flashinfer import FakeFlashinfer

pytest.importorskip("triton", reason="the extra `gpu` is not installed")
if torch.cuda.is_available():
    pytest.skip("the stand-in is for machines without a GPU", allow_module_level=True)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashinfer]:
    stand_in = FakeFlashinfer()
    monkeypatch.setattr(flashinfer_kernels, "working", lambda: stand_in)
    with registry.preferring("cpu", "flashinfer", "triton"):
        yield stand_in


@pytest.mark.parametrize(("dtype", "used"), [(torch.bfloat16, True), (torch.float32, False)])
def test_ops_give_the_references_results(
    flashinfer: FakeFlashinfer, dtype: torch.dtype, used: bool
) -> None:
    x, residual, gates = torch.randn(3, 2, 128).to(dtype)
    weight, before = torch.rand(128).to(dtype), x.clone()
    total = residual.clone()

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)

    close(pd_kernels.rms_norm(x, weight, 1e-5), pd_kernels.rms_norm_reference(x, weight, 1e-5))
    expected = pd_kernels.fused_add_rms_norm_reference(x, total, weight, 1e-5)
    close(pd_kernels.fused_add_rms_norm(x, residual, weight, 1e-5), expected)
    close(residual, total)
    assert torch.equal(x, before)
    close(pd_kernels.silu_and_mul(gates), pd_kernels.silu_and_mul_reference(gates))
    table = pd_kernels.rope_cos_sin(pd_kernels.rope_frequencies(64, 1e4), 10)
    heads, positions = torch.randn(2, 5, 64).to(dtype), torch.tensor([3, 9])
    turned = heads.clone()
    pd_kernels.rope_reference(turned[:, :2], turned[:, 2:3], positions, table)
    pd_kernels.rope(heads[:, :2], heads[:, 2:3], positions, table)
    close(heads, turned)
    names = [
        "norm.rmsnorm",
        "norm.fused_add_rmsnorm",
        "activation.silu_and_mul",
        "rope.apply_rope_with_cos_sin_cache_inplace",
    ]
    assert flashinfer.names() == (names if used else [])


def test_rows_that_are_no_whole_vectors_go_to_triton(flashinfer: FakeFlashinfer) -> None:
    x, weight = torch.randn(2, 7).bfloat16(), torch.ones(7).bfloat16()
    pd_kernels.rms_norm(x, weight, 1e-5)
    pd_kernels.silu_and_mul(torch.randn(2, 24).bfloat16())
    q = torch.randn(2, 2, 32).bfloat16()
    table = pd_kernels.rope_cos_sin(pd_kernels.rope_frequencies(32, 1e4), 10)
    pd_kernels.rope(q, q.clone(), torch.tensor([0, 1]), table)
    assert flashinfer.calls == []


def test_ops_without_a_plan_stay_with_triton(flashinfer: FakeFlashinfer) -> None:
    assert pd_kernels.backend_name("cpu") == "flashinfer+triton"


def test_a_flashinfer_that_cannot_run_gives_way() -> None:
    with pytest.raises(BackendUnavailable, match="flashinfer"):
        pd_kernels.rms_norm.__globals__["RMS_NORM"].load("flashinfer")
    with registry.preferring("cpu", "flashinfer", "triton"):
        assert pd_kernels.backend_name("cpu") == "triton"
