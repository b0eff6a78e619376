"""From what a client asked to what the cluster is asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.backend import GenerateRequest, ModelInfo
from pd_cluster.gateway.protocol import Prompt, Sampling
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import SamplingParams

# Longer texts are tokenised in a thread, so that they do not hold up the streams.
INLINE_TEXT_LENGTH = 4096


class Preparer:
    """Checks against the model's limits, before anything is sent to the cluster."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model

    async def tokenize(self, prompt: Prompt, param: str) -> list[int]:
        """`param` is the field that an error names."""
        if isinstance(prompt, str):
            if len(prompt) <= INLINE_TEXT_LENGTH:
                return self._tokenizer.encode(prompt)
            return await asyncio.to_thread(self._tokenizer.encode, prompt)
        self._check_ids(prompt, param)
        return prompt

    async def apply_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if sum(len(message["content"]) for message in messages) <= INLINE_TEXT_LENGTH:
            return self._tokenizer.apply_chat_template(messages)
        return await asyncio.to_thread(self._tokenizer.apply_chat_template, messages)

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        arrival: float,
        prompt_param: str,
        max_tokens: int | None,
        max_tokens_param: str = "max_tokens",
        default_max_tokens: int | None = None,
        seed: int | None = None,
        namespace: str | None = None,
    ) -> GenerateRequest:
        """Raises BadRequest naming the field and the limit.

        `default_max_tokens` None: as many as fit.
        """
        stop_token_ids = tuple(sampling.stop_token_ids or ())
        self._check_ids(stop_token_ids, "stop_token_ids")
        if max_tokens is None:
            room = self._room(len(prompt), 1, prompt_param, prompt_param)
            max_tokens = min(room, default_max_tokens or room)
        else:
            self._room(len(prompt), max_tokens, prompt_param, max_tokens_param)
        top_k = sampling.top_k or 0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=max(0, top_k),
            seed=secrets.randbits(63) if seed is None else seed & (2**63 - 1),
            ignore_eos=bool(sampling.ignore_eos),
            stop_token_ids=stop_token_ids,
        )
        ends = frozenset(stop_token_ids)
        if not params.ignore_eos:
            ends |= self._model.eos_token_ids
        return GenerateRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            params=params,
            arrival=arrival,
            end_token_ids=ends,
            namespace=namespace,
        )

    def _room(self, prompt_len: int, wanted: int, prompt_param: str, wanted_param: str) -> int:
        """The most tokens that an answer can have; BadRequest where `wanted` is more."""
        context, capacity = self._model.context_length, self._model.pool_capacity
        if prompt_len == 0:
            raise BadRequest("the prompt has no tokens", param=prompt_param, code="empty_prompt")
        room = min(context, capacity) - prompt_len
        if wanted <= room:
            return room
        if prompt_len + 1 > min(context, capacity):
            param, answer = prompt_param, "one token of answer"
        else:
            param, answer = wanted_param, f"{wanted_param} ({wanted})"
        what = f"the prompt ({prompt_len} tokens) and {answer} exceed"
        if context <= capacity:
            raise BadRequest(
                f"{what} the context length of {context} tokens",
                param=param,
                code="context_length_exceeded",
            )
        raise BadRequest(
            f"{what} the KV pool of {capacity} tokens", param=param, code="kv_pool_exceeded"
        )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self._tokenizer.vocab_size
        bad = next((each for each in ids if not 0 <= each < size), None)
        if bad is not None:
            raise BadRequest(
                f"{param}: token id {bad} is not in the vocabulary (0 to {size - 1})",
                param=param,
                code="invalid_token_id",
            )
