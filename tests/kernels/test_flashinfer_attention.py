"""Steps planned for flashinfer: what it is given, what is not for it, and what comes of it.

A stand-in computes as its documentation says; its own kernels run only on a GPU, where
`scripts/gpu_check` compares them with the references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pd_kernels
from pd_kernels import AttentionHeads, paged_attention, registry
from tests.kernels.fake_flashinfer import DECODE, PREFILL, FakeFlashinfer

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

APPEND = "page.append_paged_kv_cache"
HEADS = AttentionHeads(6, 2, 64, 0.125, torch.bfloat16, torch.device("cpu"))
LAYOUTS = pytest.mark.parametrize("layout", ["page_first", "layer_first"])
MakePaged = Callable[..., Any]


@dataclass(frozen=True)
class Tables:
    slots: Tensor
    q_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    ctx_lens: Tensor
    num_decode: int


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashinfer]:
    fake = FakeFlashinfer()
    monkeypatch.setattr("pd_kernels.flashinfer_kernels.working", lambda: fake)
    with registry.preferring("cpu", "flashinfer", "triton"):
        yield fake


class Step:
    """A ragged batch, the keys and values of its new tokens taken out of its pages again."""

    def __init__(self, make_paged: MakePaged, new: list[int], contexts: list[int], **pages: Any):
        batch = make_paged(contexts, **{"dtype": torch.bfloat16, "num_kv_heads": 2, **pages})
        dim = pages.get("head_dim", 64)
        ends = torch.tensor(contexts).cumsum(0).tolist()
        rows = [
            row for count, end in zip(new, ends, strict=True) for row in range(end - count, end)
        ]
        self.written = batch.pool.clone()
        self.fused = torch.randn(len(rows), 10, dim, generator=torch.Generator().manual_seed(5)).to(
            batch.pool.dtype
        )
        self.fused[:, 6:8], self.fused[:, 8:] = torch.cat(batch.k)[rows], torch.cat(batch.v)[rows]
        slots = batch.slots[rows]
        for each in (batch.k_pages, batch.v_pages):
            each[slots // each.shape[1], slots % each.shape[1]] = 7.0
        self.batch = batch
        bounds = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        decodes = next((row for row, count in enumerate(new) if count > 1), len(new))
        self.tables = Tables(slots, bounds, *batch.table, decodes)

    def run(self, attention: Any) -> Tensor:
        q, k, v = self.fused.split([6, 2, 2], dim=1)
        attention.write(k, v, self.batch.k_pages, self.batch.v_pages)
        torch.testing.assert_close(self.batch.pool, self.written, rtol=0, atol=0, equal_nan=True)
        return attention.attend(q, self.batch.k_pages, self.batch.v_pages)

    def expected(self) -> Tensor:
        return pd_kernels.prefill_attention_reference(
            self.fused[:, :6],
            self.batch.k_pages,
            self.batch.v_pages,
            self.tables.q_indptr,
            *self.batch.table,
            HEADS.scale,
        )


@LAYOUTS
@pytest.mark.parametrize("page_size", [1, 16, 512])
@pytest.mark.parametrize(
    ("new", "contexts", "used"),
    [
        ([1, 1, 1], [1, 40, 16], [DECODE]),
        ([33, 5], [33, 70], [PREFILL]),
        ([1, 1, 7, 20], [17, 3, 40, 20], [DECODE, PREFILL]),
    ],
    ids=["decode", "prefill", "mixed"],
)
def test_a_step_gives_what_the_reference_does(
    fake: FakeFlashinfer,
    make_paged: MakePaged,
    layout: str,
    page_size: int,
    new: list[int],
    contexts: list[int],
    used: list[str],
) -> None:
    step = Step(make_paged, new, contexts, layout=layout, page_size=page_size)
    attention = paged_attention(HEADS)
    fake.calls.clear()
    out = step.run(attention.step(step.tables, step.tables, step.batch.k_pages))
    torch.testing.assert_close(out, step.expected(), rtol=2**-7, atol=2**-7)
    runs = [f"{wrapper}.run" for wrapper in used]
    assert fake.names() == [*(f"{wrapper}.plan" for wrapper in used), APPEND, *runs]


def test_one_plan_serves_all_layers(fake: FakeFlashinfer, make_paged: MakePaged) -> None:
    step = Step(make_paged, [1, 4], [9, 12], layout="page_first", page_size=4)
    planned = paged_attention(HEADS).step(step.tables, step.tables, step.batch.k_pages)
    fake.calls.clear()
    assert torch.equal(step.run(planned), step.run(planned))
    assert not any(name.endswith("plan") for name in fake.names())


@LAYOUTS
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_captured_step_is_planned_for_each_replay(
    fake: FakeFlashinfer, make_paged: MakePaged, layout: str, page_size: int
) -> None:
    first = Step(make_paged, [1, 1, 1], [1, 30, 7], layout=layout, page_size=page_size)
    table = first.tables
    memory = Tables(
        table.slots.clone(),
        table.q_indptr.clone(),
        table.kv_indptr.clone(),
        torch.cat([table.kv_indices, torch.zeros(50, dtype=torch.int32)]),
        table.ctx_lens.clone(),
        3,
    )
    planned = paged_attention(HEADS).captured(memory, first.batch.k_pages)
    for contexts in ([1, 30, 7], [22, 1, 16]):
        step = Step(make_paged, [1, 1, 1], contexts, layout=layout, page_size=page_size)
        for name in ("slots", "kv_indptr", "ctx_lens", "kv_indices"):
            values = getattr(step.tables, name)
            getattr(memory, name)[: len(values)] = values
        if contexts[0] > 1:
            with pytest.raises(AssertionError):  # planned for other lengths
                step.run(planned)
        planned.plan(step.tables)
        out = step.run(planned)
        torch.testing.assert_close(out, step.expected(), rtol=2**-7, atol=2**-7)
    captured = fake.calls[[*fake.names()].index(f"{DECODE}.__init__", 1) :]
    assert captured[0][2]["use_cuda_graph"] is True
    # A row that fills up a batch has no slot: pages are written by a kernel that knows such rows.
    assert APPEND not in [name for name, _, _ in captured]
    memory.slots.fill_(-1)
    before = step.batch.pool.clone()
    planned.write(step.fused[:, 6:8], step.fused[:, 8:], step.batch.k_pages, step.batch.v_pages)
    assert torch.equal(before.nan_to_num(3.0), step.batch.pool.nan_to_num(3.0))


@pytest.mark.parametrize(
    ("change", "pages"),
    [
        ({"dtype": torch.float32}, {"dtype": torch.float32}),
        ({"head_dim": 32}, {"head_dim": 32}),
    ],
    ids=["float32", "head-dim"],
)
def test_heads_that_it_does_not_take_go_to_triton(
    fake: FakeFlashinfer,
    make_paged: MakePaged,
    change: dict[str, Any],
    pages: dict[str, Any],
) -> None:
    step = Step(make_paged, [1, 3], [5, 9], layout="page_first", page_size=4, **pages)
    attention = paged_attention(replace(HEADS, **change))
    out = step.run(attention.step(step.tables, step.tables, step.batch.k_pages))
    torch.testing.assert_close(out, step.expected(), rtol=2**-6, atol=2**-6)
    assert fake.calls == []


def test_pools_that_it_does_not_take_go_to_triton(
    fake: FakeFlashinfer, make_paged: MakePaged
) -> None:
    attention = paged_attention(HEADS)
    fake.calls.clear()
    step = Step(make_paged, [1, 3], [5, 9], layout="page_first", page_size=4)
    # Views of a pool whose pages are a few bytes apart, so that no vector load is aligned.
    pool = torch.zeros(len(step.batch.pool), 4 * 2 * 64 + 4, dtype=torch.bfloat16)
    k_pages = pool[:, : 4 * 2 * 64].view(-1, 4, 2, 64)
    planned = attention.step(step.tables, step.tables, k_pages)
    captured = attention.captured(replace(step.tables, num_decode=1), k_pages)
    assert fake.calls == []
    assert type(planned) is type(captured)


@pytest.mark.parametrize(
    ("heads", "tensor_cores"), [((4, 4), False), ((6, 2), False), ((8, 2), True), ((14, 2), True)]
)
def test_groups_of_heads_choose_the_kernel(
    fake: FakeFlashinfer, heads: tuple[int, int], tensor_cores: bool
) -> None:
    paged_attention(replace(HEADS, num_heads=heads[0], num_kv_heads=heads[1]))
    made = [kwargs for name, _, kwargs in fake.calls if name == f"{DECODE}.__init__"]
    assert [each["use_tensor_cores"] for each in made] == [tensor_cores]


def test_where_it_fails_attention_is_by_triton(
    fake: FakeFlashinfer, make_paged: MakePaged, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    fake.page.append_paged_kv_cache = broken
    attention = paged_attention(HEADS)
    assert "no compiler here" in caplog.text
    step = Step(make_paged, [1, 3], [5, 9], layout="page_first", page_size=4)
    fake.calls.clear()
    out = step.run(attention.step(step.tables, step.tables, step.batch.k_pages))
    torch.testing.assert_close(out, step.expected(), rtol=2**-6, atol=2**-6)
    assert fake.calls == []
