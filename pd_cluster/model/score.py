"""How likely the model found tokens that are known: logprobs of a prompt."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pd_cluster.draw import Known, Scores

# Rows at once: what is in between takes their logits' memory again.
_ROWS = 32


@torch.inference_mode()
def score(logits: Tensor, known: Known) -> Scores:
    """Of `known.tokens` [N], by `logits` [N, vocab] float32 after the token before each.

    Logprobs are those of the model's own distribution, as `choose`'s.
    """
    tokens = torch.from_numpy(known.tokens.astype(np.int64)).to(logits.device)
    top = min(known.top, logits.shape[1])
    count = len(known.tokens)
    logprobs, ranks = torch.empty(count), torch.empty(count, dtype=torch.int32)
    top_ids = torch.empty(count, top, dtype=torch.int32)
    top_logprobs = torch.empty(count, top)
    for at in range(0, count, _ROWS):
        part = slice(at, at + _ROWS)
        rows = logits[part]
        total = torch.logsumexp(rows, -1, keepdim=True)
        chosen = rows.gather(1, tokens[part, None])
        logprobs[part] = (chosen - total).squeeze(1)
        ranks[part] = (rows > chosen).sum(1, dtype=torch.int32) + 1
        if top:
            best = rows.topk(top)
            top_ids[part] = best.indices.to(torch.int32)
            top_logprobs[part] = best.values - total
    return Scores(logprobs.numpy(), ranks.numpy(), top_ids.numpy(), top_logprobs.numpy())
