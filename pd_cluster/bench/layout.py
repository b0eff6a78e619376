"""Page-first against layer-first KV memory: kernels over its pages, and moving pages between two
processes.

Both layouts take turns, call by call, and the fastest turn counts: what the machine does when
nothing else disturbs it. Shapes are SmolLM2-135M's in float32, as the embedded default serves it;
the pages of every sequence lie in random order.
"""

from __future__ import annotations

import json
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

import pd_kernels
from pd_cluster.cache.layout import Layout, make_layout
from pd_transfer import Event, agent

LAYOUTS: Final = ("page_first", "layer_first")
PAGE_SIZES: Final = (1, 16)

_DTYPE = torch.float32
_MIN_TURNS = 4


@dataclass(frozen=True)
class Sizes:
    """Of the model and of what is measured; lengths in tokens."""

    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    batches: tuple[int, int] = (1, 8)
    contexts: tuple[int, int] = (512, 2048)
    chunk: int = 512
    answer: int = 128

    @property
    def prompt(self) -> int:
        """Two chunks; so many tokens' pages are moved."""
        return 2 * self.chunk

    @property
    def pool(self) -> int:
        return max(self.batches) * max(self.contexts)

    def request(self) -> dict[str, float]:
        """One request, from the cases: a prompt in two chunks, whose pages all move scattered, then
        an answer, decoded together with the others of a batch.
        """
        batch = self.batches[-1]
        return {
            f"prefill_attention.{self.chunk}_of_{self.chunk}": 1,
            f"prefill_attention.{self.chunk}_of_{self.prompt}": 1,
            f"page_write.{self.chunk}": 2,
            f"transfer.scattered_{self.prompt}": 1,
            f"decode_attention.{batch}_of_{self.contexts[0]}": self.answer / batch,
            f"page_write.{batch}": self.answer / batch,
        }


def run(sizes: Sizes = Sizes(), *, seconds_each: float = 3.0) -> dict[str, float]:
    """`layout.<layout>.<page_size>.<case>_us`: the fastest turn, over all layers.

    `layout.ratio.<page_size>.<case>` is page-first's time by layer-first's. The case `request` is
    what all of it costs one request. `seconds_each` is how long a case is measured, both layouts
    together. Raises ChildProcessError where the other process of the transfers ends early.
    """
    figures: dict[str, float] = {}
    with torch.inference_mode():
        for page_size in PAGE_SIZES:
            figures |= _page_size(sizes, page_size, seconds_each)
    return figures


def conclusions(figures: dict[str, float]) -> list[str]:
    """What the figures of `run` say, in sentences."""
    lines = []
    for page_size in PAGE_SIZES:
        prefix = f"layout.ratio.{page_size}."
        ratios = {k.removeprefix(prefix): v for k, v in figures.items() if k.startswith(prefix)}
        request = ratios.pop("request")
        wins = {
            "page-first is faster": [f"{k} ({1 / v:.1f}x)" for k, v in ratios.items() if v < 0.9],
            "layer-first is faster": [f"{k} ({v:.1f}x)" for k, v in ratios.items() if v > 1.1],
            "within 10 %": [k for k, v in ratios.items() if 0.9 <= v <= 1.1],
        }
        lines += [
            f"page size {page_size}, {verdict}: {', '.join(cases)}"
            for verdict, cases in wins.items()
            if cases
        ]
        better, factor = ("page-first", 1 / request) if request < 1 else ("layer-first", request)
        lines.append(
            f"page size {page_size}, a whole request: {better} takes less, by {factor:.2f}x"
        )
    return lines


def _page_size(sizes: Sizes, page_size: int, seconds_each: float) -> dict[str, float]:
    torch.manual_seed(0)
    order = np.random.default_rng(0).permutation(sizes.pool // page_size).astype(np.int32)
    with ExitStack() as stack:
        calls: dict[str, dict[str, Callable[[], object]]] = {}
        for name in LAYOUTS:
            pool = _pool(sizes, name, page_size)
            pool.buffer.uniform_(-1, 1)
            move = stack.enter_context(_peer(sizes, pool))
            for case, call in _cases(sizes, pool, order, move):
                calls.setdefault(case, {})[name] = call
        best = {case: _take_turns(by_layout, seconds_each) for case, by_layout in calls.items()}
    best["request"] = {
        name: sum(factor * best[case][name] for case, factor in sizes.request().items())
        for name in LAYOUTS
    }
    times = {
        f"layout.{name}.{page_size}.{case}_us": best[case][name]
        for name in LAYOUTS
        for case in best
    }
    ratios = {
        f"layout.ratio.{page_size}.{case}": by_layout["page_first"] / by_layout["layer_first"]
        for case, by_layout in best.items()
    }
    return times | ratios


def _take_turns(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Microseconds of the fastest call of each; one turn before is not counted."""
    best = dict.fromkeys(calls, float("inf"))
    end, turn = time.perf_counter() + seconds, 0
    while turn <= _MIN_TURNS or time.perf_counter() < end:
        # Whoever comes second finds the caches full of the other's pages: take turns at that too.
        for name in sorted(calls, reverse=bool(turn % 2)):
            start = time.perf_counter()
            calls[name]()
            if turn:
                best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
        turn += 1
    return best


def _pool(sizes: Sizes, name: str, page_size: int) -> Layout:
    model = (sizes.layers, page_size, sizes.kv_heads, sizes.head_dim)
    return make_layout(name, sizes.pool // page_size, *model, _DTYPE, "cpu")


def _cases(
    sizes: Sizes, pool: Layout, order: NDArray[np.int32], move: Callable[[NDArray[np.int32]], None]
) -> Iterator[tuple[str, Callable[[], object]]]:
    views = [(pool.k(layer), pool.v(layer)) for layer in range(sizes.layers)]
    scale, chunk = sizes.head_dim**-0.5, sizes.chunk
    pages = torch.from_numpy(order)

    def table(batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each = context // pool.page_size
        indptr = torch.arange(batch + 1, dtype=torch.int32) * each
        return indptr, pages[: batch * each], torch.full((batch,), context, dtype=torch.int32)

    def decode(batch: int, context: int) -> Callable[[], object]:
        q, sequences = torch.randn(batch, sizes.heads, sizes.head_dim), table(batch, context)
        return lambda: [pd_kernels.decode_attention(q, *kv, *sequences, scale) for kv in views]

    def prefill(context: int) -> Callable[[], object]:
        q, sequences = torch.randn(chunk, sizes.heads, sizes.head_dim), table(1, context)
        bounds = torch.tensor([0, chunk], dtype=torch.int32)
        return lambda: [
            pd_kernels.prefill_attention(q, *kv, bounds, *sequences, scale) for kv in views
        ]

    def write(tokens: int, slots: torch.Tensor) -> Callable[[], object]:
        k, v = torch.randn(2, tokens, sizes.kv_heads, sizes.head_dim)

        def call() -> None:
            for kv in views:
                pd_kernels.page_write(k, v, *kv, slots)

        return call

    for context in sizes.contexts:
        for batch in sizes.batches:
            yield f"decode_attention.{batch}_of_{context}", decode(batch, context)
    for context in (chunk, sizes.prompt):
        yield f"prefill_attention.{chunk}_of_{context}", prefill(context)
    # Prefill fills pages; a decode step writes one token into a page of each sequence.
    firsts = pages[: chunk // pool.page_size, None].long() * pool.page_size
    yield f"page_write.{chunk}", write(chunk, (firsts + torch.arange(pool.page_size)).view(-1))
    batch = sizes.batches[-1]
    yield f"page_write.{batch}", write(batch, pages[:batch].long() * pool.page_size)
    count = sizes.prompt // pool.page_size
    yield f"transfer.scattered_{sizes.prompt}", partial(move, order[:count])
    together = np.arange(count, dtype=np.int32)
    yield f"transfer.contiguous_{sizes.prompt}", partial(move, together)


# --- the other process ---


@contextmanager
def _peer(sizes: Sizes, pool: Layout) -> Iterator[Callable[[NDArray[np.int32]], None]]:
    """Another process with an equal pool; gives a call that writes pages into its last pages."""
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    secret = secrets.token_bytes(32)
    process = subprocess.Popen(
        [sys.executable, "-c", "from pd_cluster.bench.layout import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        order = {
            "sizes": asdict(sizes),
            "pool": [pool.name, pool.page_size],
            "secret": secret.hex(),
        }
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        with agent(name="bench-source", secret=secret) as source:
            source.register_memory([(*pool.region(), "")], "DRAM")
            line = process.stdout.readline()
            if not line:
                raise ChildProcessError("the process that pages were to be written to has ended")
            answer = json.loads(line)
            source.add_remote_agent(bytes.fromhex(answer["metadata"]))
            source.set_event_callback(ended.put)
            mine = source.prep_xfer_dlist("NIXL_INIT_AGENT", pool.descriptors(), "DRAM")
            region: Any = tuple(answer["region"])
            theirs = source.prep_xfer_dlist("bench-target", pool.descriptors(region), "DRAM")

            def move(pages: NDArray[np.int32]) -> None:
                rows = pool.rows(pages)
                handle = source.make_prepped_xfer(
                    "WRITE", mine, rows, theirs, pool.rows(pool.num_pages - 1 - pages[::-1])
                )
                source.transfer(handle)
                ended.get()
                assert source.check_xfer_state(handle) == "DONE"
                handle.release()

            yield move
    finally:
        process.kill()
        process.communicate()


def serve() -> None:
    """The other process: says where its pool is on stdout, ends with stdin."""
    order = json.loads(sys.stdin.readline())
    pool = _pool(Sizes(**order["sizes"]), *order["pool"])
    with agent(name="bench-target", secret=bytes.fromhex(order["secret"])) as target:
        target.register_memory([(*pool.region(), "")], "DRAM")
        answer = {"metadata": target.get_agent_metadata().hex(), "region": pool.region()}
        print(json.dumps(answer), flush=True)
        sys.stdin.read()
