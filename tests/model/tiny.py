"""Small models with random weights, and running them over a page pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pd_cluster.cache.layout import LayerFirstLayout, Layout, PageFirstLayout
from pd_cluster.model.batch import Chunk, build_batch
from pd_cluster.model.decoder import Decoder

VOCAB = 97


def save_tiny(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    shard_size: str = "1GB",
    **settings: Any,
) -> None:
    """A random model as transformers saves it; weights large enough for logits that differ.

    `family` is transformers' model type.
    """
    torch.manual_seed(seed)
    shape = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 112,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**shape, **settings}), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model.save_pretrained(folder, max_shard_size=shard_size)


class Runner:
    """A decoder with a page pool, from which sequences take scattered pages."""

    def __init__(
        self,
        decoder: Decoder,
        layout: str,
        page_size: int,
        dtype: torch.dtype,
        num_pages: int = 128,
    ) -> None:
        config = decoder.config
        kind: type[Layout] = PageFirstLayout if layout == "page_first" else LayerFirstLayout
        self.decoder = decoder
        self.page_size = page_size
        self.kv = kind(
            num_pages,
            config.num_layers,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            "cpu",
        )
        # What was never written must not matter.
        self.kv.buffer.fill_(7.0)
        self._free = list(np.random.default_rng(1).permutation(num_pages))

    def pages(self, tokens: int) -> list[int]:
        return [int(self._free.pop()) for _ in range(-(-tokens // self.page_size))]

    def step(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk]) -> torch.Tensor:
        return self.decoder.forward(build_batch(decodes, prefills, self.page_size), self.kv)

    def greedy(self, prompt: Sequence[int], max_tokens: int, chunk: int) -> list[int]:
        """Chunked prefill of `prompt`, then decode steps."""
        pages = self.pages(len(prompt) + max_tokens)
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            last = end == len(prompt)
            logits = self.step([], [Chunk(prompt[start:end], start, pages, logits=last)])
        tokens = [int(logits.argmax())]
        while len(tokens) < max_tokens:
            position = len(prompt) + len(tokens) - 1
            logits = self.step([Chunk(tokens[-1:], position, pages)], [])
            tokens.append(int(logits.argmax()))
        return tokens


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return ids
