"""What the HTTP application needs of a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from pd_cluster.gateway.instructions import Usage
from pd_cluster.observability.snapshots import ClusterSnapshot
from pd_cluster.pools import KvPool
from pd_cluster.scaling import Refusal, ScalingStatus, Wish
from pd_cluster.types import FinishReason, PromptScores, Role, SamplingParams, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the gateway tells about the model, and checks requests against; lengths in tokens.

    `vocab_size` bounds token ids where the model's is smaller than the tokenizer's. `aliases` are
    further names that requests may use. `sampling_defaults` stand for what a request
    leaves out: temperature, top_p, top_k, min_p, repetition_penalty. `kv_pool` is each worker's.
    """

    name: str
    context_length: int
    pool_capacity: int
    kv_pool: KvPool | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What decides when a request is served, beside its arrival.

    `tenant` says whose it is, by another name than its key; "" is nobody's in particular.
    """

    priority: int = 0
    tenant: str = ""
    routing_key: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sequence: a prompt to continue.

    `arrival` is when its bytes came (seconds of `time.monotonic`), `end_token_ids` are those that
    end the sequence. `sequence` tells those of one prompt apart: with one seed they still draw
    differently. `timeout_s` is the client's own limit; the server's holds besides. `prompt_only`:
    the client wants no tokens; the one that the cluster cannot do without is not passed on.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float
    end_token_ids: frozenset[int] = field(default_factory=frozenset)
    namespace: str | None = None
    sequence: int = 0
    timeout_s: float | None = None
    standing: Standing = field(default_factory=Standing)
    prompt_only: bool = False


@dataclass(frozen=True)
class Generated:
    """New tokens; the last one of a generation carries `finish_reason`.

    `logprobs` has one entry a token where they were asked for; `prompt_scores` come first.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_scores: PromptScores | None = None


class Generation(Protocol):
    """A running request. Leaving the context ends it, on the workers too.

    Iterating gives Generated, and raises RequestError where the request fails.
    """

    @property
    def usage(self) -> Usage: ...

    def stop(self) -> None:
        """A stop string was found: the request is finished, not aborted."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[Generated]: ...


class Backend(Protocol):
    """A cluster, as the HTTP application sees it."""

    def generate(self, request: GenerateRequest) -> Generation: ...

    async def ready(self) -> str | None:
        """Why no request can be served now; None when one can."""
        ...

    async def snapshot(self) -> ClusterSnapshot:
        """The state of coordinator and workers; those that do not answer in time are missing."""
        ...

    def stories(self, request_id: str) -> list[dict[str, Any]]:
        """What became of each sequence of a running or recent request; empty: not known."""
        ...

    async def wish(self, wish: Wish) -> ScalingStatus | Refusal:
        """Has other numbers of actors, or a worker removed; returns once that has been taken.

        Raises Unavailable where nobody answers.
        """
        ...

    async def scaling(self) -> ScalingStatus | None:
        """The actors that there are and shall be; None: not known yet. Raises Unavailable."""
        ...

    async def placements(self, sequence: str, attempts: int) -> list[dict[str, Any]]:
        """Why each of a sequence's attempts was placed where it was, as far as that is known."""
        ...

    async def flush(self, role: Role | None) -> dict[str, Any]:
        """Empties the prefix caches of `role`'s workers, or of all; what was done, by worker."""
        ...
