"""Logprobs, ranks and the likeliest tokens of tokens that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pd_cluster.draw import Known, Scores, pack_scores, unpack_scores
from pd_cluster.model.score import score


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize("top", [0, 1, 5, 50])
def test_against_log_softmax(count: int, top: int) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, 20, generator=generator) * 4
    tokens = torch.randint(0, 20, (count,), generator=generator)
    scores = score(logits, Known(tokens.numpy().astype(np.int32), top))
    wanted = logits.log_softmax(-1)
    rows = torch.arange(count)
    assert np.allclose(scores.logprobs, wanted[rows, tokens], atol=1e-6)
    better = (wanted > wanted[rows, tokens][:, None]).sum(1)
    assert scores.ranks.tolist() == (better + 1).tolist()
    best = wanted.topk(min(top, 20))
    assert scores.top_ids.tolist() == best.indices.tolist()
    assert np.allclose(scores.top_logprobs, best.values, atol=1e-6)


def test_parts_are_packed_into_a_whole() -> None:
    logits = torch.randn(70, 9)
    tokens = np.arange(70, dtype=np.int32) % 9
    whole = score(logits, Known(tokens, 2))
    parts = [score(logits[part], Known(tokens[part], 2)) for part in (slice(0, 0), slice(0, 70))]
    for one, other in zip(unpack_scores(pack_scores(parts)), whole, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    empty = pack_scores([Scores(*(part[:0] for part in whole))])
    assert unpack_scores(empty).top_ids.shape == (0, 2)
