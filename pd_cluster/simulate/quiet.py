"""Steps that give every running sequence one more token, and change nothing else.

Nearly all steps of a decode worker are such: no page is allocated, nobody ends, nothing is computed
beside. What the scheduler would do in each is known, so many are taken in at once. Their times are
those that they would have one by one, and as soon as the worker is told anything, the step that it
comes in is planned and carried out by the scheduler itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_cluster.coordinator.costs import DecodeMeasured
from pd_cluster.worker.instructions import Batch
from pd_cluster.worker.scheduler import WorkerScheduler
from pd_cluster.worker.sequence import Sequence

# Fewer are left to the scheduler: setting them apart costs as much.
WORTHWHILE = 4


@dataclass(slots=True)
class QuietSteps:
    """`ends` (virtual time) and `seconds` of each step; `held` KV tokens before the first.

    The measure of step `told` was the last that was asked for.
    """

    sequences: list[Sequence]
    start: float
    ends: NDArray[np.float64]
    seconds: NDArray[np.float64]
    held: int
    told: int = -1

    def __len__(self) -> int:
        return len(self.ends)

    def ended(self, now: float) -> int:
        """How many of the steps are over."""
        return int(np.searchsorted(self.ends, now, side="right"))

    def began(self, step: int) -> float:
        return float(self.ends[step - 1]) if step else self.start

    def measured(self, step: int) -> DecodeMeasured:
        count = len(self.sequences)
        return DecodeMeasured(count, self.held + count * (step + 1), float(self.seconds[step]))


def count_quiet(scheduler: WorkerScheduler, batch: Batch) -> int:
    """How many steps from `batch` on are quiet, if nobody tells the worker anything.

    Answers end by their length here, and all of a batch's rows were planned just now.
    """
    if batch.prefill or batch.copies or scheduler.prefill.jobs:
        return 0
    decode = scheduler.decode
    least = 1 << 30
    for row in batch.decode:
        seq = decode.sequences[row.attempt]
        to_its_last = seq.request.params.max_tokens - seq.num_output - 1
        to_the_next_page = seq.table.num_pages * decode.page_size - seq.kv_len
        least = min(least, to_its_last, to_the_next_page)
    return least


def take_in(
    scheduler: WorkerScheduler, sequences: list[Sequence], tokens: list[int], n: int
) -> None:
    """Does what `n` quiet steps do, each with the same token for a sequence."""
    for seq, token in zip(sequences, tokens, strict=True):
        seq.append(token, n)
        seq.kv_len += n
        seq.outputs += n
    scheduler.decode.generated_tokens += n * len(sequences)
