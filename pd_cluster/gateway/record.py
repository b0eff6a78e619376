"""What is known of one HTTP request, and told in the log when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pd_cluster.gateway.answer import Pieces, total_usage
from pd_cluster.gateway.instructions import Usage

access_log = logging.getLogger("pd_cluster.access")


@dataclass
class RequestRecord:
    """`request_id` is the client's own where it sent one; `unique_id` begins with it, and names
    the request on every worker and in every log.

    `prompt` is what was asked, kept only where the configuration wants it logged.
    """

    request_id: str
    unique_id: str
    method: str
    path: str
    arrival: float
    status: int | None = None
    error: str | None = None
    first_token_at: float | None = None
    prompt: Any = None
    details: dict[str, Any] = field(default_factory=dict)

    async def watch(self, pieces: Pieces, per_prompt: int) -> Pieces:
        """Passes `pieces` on, and keeps the accounts."""
        usages: dict[int, Usage] = {}
        reasons: dict[int, str] = {}
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    if self.first_token_at is None:
                        self.first_token_at = time.monotonic()
                    usages[index] = piece.usage
                    if piece.finish_reason is not None:
                        reasons[index] = piece.finish_reason
                    yield index, piece
        finally:
            self._account(usages, reasons, per_prompt)

    def log(self) -> None:
        """One line; 499: the client hung up."""
        fields = {
            "request_id": self.request_id,
            "id": self.unique_id,
            "method": self.method,
            "path": self.path,
            "status": self.status if self.status is not None else 499,
            **({"error": self.error} if self.error else {}),
            **self.details,
            "total_s": round(time.monotonic() - self.arrival, 6),
            **({"prompt": self.prompt} if self.prompt is not None else {}),
        }
        access_log.info("%s %s", self.method, self.path, extra={"fields": fields})

    def _account(
        self, usages: Mapping[int, Usage], reasons: Mapping[int, str], per_prompt: int
    ) -> None:
        total = total_usage(usages, per_prompt)
        self.details |= {
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "completion_tokens": total.completion_tokens,
            "finish_reasons": [reasons[index] for index in sorted(reasons)],
        }
        if self.first_token_at is not None:
            self.details["ttft_s"] = round(self.first_token_at - self.arrival, 6)
