"""What the tiers below the KV pool save: the first token of a prompt that was evicted, loaded from
host memory, against computing it; and how fast storage reads and writes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pd_cluster.bench.client import generate, random_tokens, server
from pd_cluster.cache.storage_file import FileStorage

POOL_TOKENS = 4096
PROMPT_TOKENS = 1024
# A working set of twice the pool, asked for round by round: each prompt has left the pool when it
# comes again.
PROMPTS = 2 * POOL_TOKENS // PROMPT_TOKENS
_BLOCK_BYTES = 3 << 20
_BLOCKS = 64


def run() -> dict[str, float]:
    """`tiers.ttft_recompute_s` and `tiers.ttft_host_s`, medians over the working set; their ratio
    is the median of host by recompute for the same prompt. `tiers.hit_rate` is what of the second
    round's tokens was not computed again.

    `tiers.file.write_gbps` and `tiers.file.read_gbps` are those of the file backend, checksums
    included, with a memcpy of the same blocks beside them.
    """
    return _first_tokens() | _file()


def conclusions(figures: dict[str, float]) -> list[str]:
    """What the figures of `run` say, in sentences."""
    ratio = figures["tiers.ttft_ratio"]
    aim = "as aimed for" if ratio < 0.5 else "above the aim"
    return [
        f"with a working set of twice the pool, the first token from the host tier comes after"
        f" {ratio:.3f} of the time that computing takes ({aim}: under 0.5), and"
        f" {figures['tiers.hit_rate']:.1%} of the tokens are not computed again"
    ]


def _first_tokens() -> dict[str, float]:
    prompts = [random_tokens(PROMPT_TOKENS) for _ in range(PROMPTS)]
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 3.0}
    with server(None, max_total_tokens=POOL_TOKENS, **tiers) as url:
        generate(url, random_tokens(PROMPT_TOKENS), 1)  # warms up whatever is made at first use
        cold = [generate(url, prompt, 1) for prompt in prompts]
        warm = [generate(url, prompt, 1) for prompt in prompts]
    return {
        "tiers.ttft_recompute_s": statistics.median(each.first_token_s for each in cold),
        "tiers.ttft_host_s": statistics.median(each.first_token_s for each in warm),
        "tiers.ttft_ratio": statistics.median(
            w.first_token_s / c.first_token_s for c, w in zip(cold, warm, strict=True)
        ),
        "tiers.hit_rate": sum(each.cached for each in warm) / (PROMPTS * PROMPT_TOKENS),
    }


def _file() -> dict[str, float]:
    data = np.random.default_rng(0).integers(0, 255, (_BLOCKS, _BLOCK_BYTES), np.uint8)
    out = np.zeros_like(data)
    keys = [number.to_bytes(32, "big") for number in range(_BLOCKS)]
    folder = tempfile.mkdtemp(prefix="pdb")
    try:
        storage = FileStorage(Path(folder), 1 << 40)
        write_s = _timed(lambda: storage.put(keys, [row.data for row in data]))
        read_s = _timed(lambda: storage.get(keys, [row.data for row in out]))
    finally:
        shutil.rmtree(folder)
    copy_s = _timed(lambda: np.copyto(out, data))
    total = data.nbytes / 1e9
    return {
        "tiers.file.write_gbps": total / write_s,
        "tiers.file.read_gbps": total / read_s,
        "tiers.file.memcpy_gbps": total / copy_s,
    }


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
