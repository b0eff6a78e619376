"""From what a client asked to what the cluster is asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.backend import GenerateRequest, ModelInfo, Standing
from pd_cluster.gateway.messages import ChatMessage, needs_tools
from pd_cluster.gateway.protocol import MAX_PROMPTS, Prompt, Sampling
from pd_cluster.gateway.stories import sequence_id
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.types import SamplingParams

# Longer texts are tokenised in a thread, so that they do not hold up the streams.
INLINE_TEXT_LENGTH = 4096
# Logprobs of all prompts of one request: what an answer and the messages before it may hold.
MAX_SCORES = 2**22
# Colder is greedy: the division would leave float32's range.
COLDEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What routes know by names of their own; `..._param` is the name that an error tells.

    `default_max_tokens` None: as many as fit; `max_tokens` 0: only the prompt is wanted. `logprobs`
    and `prompt_logprobs` are SamplingParams'.
    """

    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    min_tokens: int | None = None
    min_tokens_param: str = "min_tokens"
    logprobs: int = -1
    prompt_logprobs: int = -1
    seed: int | None = None
    namespace: str | None = None
    timeout_s: float | None = None
    standing: Standing = field(default_factory=Standing)


class Preparer:
    """Checks against the model's limits, before anything is sent to the cluster."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        sizes = (tokenizer.vocab_size, model.vocab_size or tokenizer.vocab_size)
        self._vocab_size = min(sizes)

    async def tokenize(
        self, prompt: Prompt, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """`param` is the field that an error names."""
        if not isinstance(prompt, str):
            self.check_ids(prompt, param)
            return prompt

        def encode() -> list[int]:
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return encode() if len(prompt) <= INLINE_TEXT_LENGTH else await asyncio.to_thread(encode)

    async def apply_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Raises BadRequest for tools that the model's template has no place for."""
        if (tools or needs_tools(messages)) and not self._tokenizer.knows_tools:
            raise BadRequest(
                "this model's chat template knows no tools",
                param="tools" if tools else "messages",
                code="unsupported_parameter",
            )
        rendered = [message.rendered for message in messages]

        def apply() -> list[int]:
            return self._tokenizer.apply_chat_template(
                rendered, tools=tools, add_generation_prompt=add_generation_prompt
            )

        short = sum(len(message["content"]) for message in rendered) <= INLINE_TEXT_LENGTH
        return apply() if short and not tools else await asyncio.to_thread(apply)

    def requests(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        wishes: Wishes,
        *,
        arrival: float,
    ) -> list[GenerateRequest]:
        """The sequences of a request, those of one prompt in a row.

        Raises BadRequest naming the field and the limit.
        """
        number = sampling.sequences
        if len(prompts) * number > MAX_PROMPTS:
            message = f"{len(prompts)} prompts x n ({number}): more than {MAX_PROMPTS} sequences"
            raise BadRequest(message, param="n", code="too_many_sequences")
        seed = secrets.randbits(63) if wishes.seed is None else wishes.seed & (2**63 - 1)
        requests: list[GenerateRequest] = []
        scored, scores = wishes.prompt_logprobs >= 0, 0
        for prompt in prompts:
            # Without a seed of the client's, equal prompts of a batch draw differently.
            drawn = seed if wishes.seed is not None else seed + len(requests) & (2**63 - 1)
            params = self._params(len(prompt), sampling, wishes, drawn)
            scores += len(prompt) * (2 + params.prompt_logprobs) if scored else 0
            if scores > MAX_SCORES:
                raise BadRequest(
                    f"the prompts' logprobs, {scores} or more, are more than {MAX_SCORES} in one"
                    " request: send fewer prompts, or ask for fewer",
                    param=wishes.prompt_param,
                    code="too_many_logprobs",
                )
            first = GenerateRequest(
                request_id=request_id,
                prompt=tuple(prompt),
                params=params,
                arrival=arrival,
                end_token_ids=frozenset(params.stop_token_ids),
                namespace=wishes.namespace,
                timeout_s=wishes.timeout_s,
                standing=wishes.standing,
                prompt_only=wishes.max_tokens == 0,
            )
            # One sequence brings them for all.
            others = structs.replace(params, prompt_logprobs=-1)
            for sequence in range(number):
                name = sequence_id(request_id, len(requests))
                mine = others if sequence else params
                named = replace(first, request_id=name, sequence=sequence, params=mine)
                requests.append(named)
        return requests

    def _params(
        self, prompt_len: int, sampling: Sampling, wishes: Wishes, seed: int
    ) -> SamplingParams:
        self.check_ids(sampling.stop_token_ids or (), "stop_token_ids")
        # Workers know the model's end-of-sequence ids, but not the tokenizer's.
        eos = frozenset() if sampling.ignore_eos else self._model.eos_token_ids
        stop_token_ids = tuple(sorted(eos.union(sampling.stop_token_ids or ())))
        biases = tuple((int(key), bias) for key, bias in (sampling.logit_bias or {}).items())
        self.check_ids([token for token, _ in biases], "logit_bias")
        temperature = self._default("temperature", sampling.temperature, 1.0)
        # One token is drawn in any case.
        max_tokens = max(1, self._max_tokens(prompt_len, wishes))
        min_tokens = wishes.min_tokens or 0
        if min_tokens > max_tokens:
            param, limit = wishes.min_tokens_param, wishes.max_tokens_param
            raise BadRequest(
                f"{param} ({min_tokens}) is more than {limit} ({max_tokens})", param=param
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < COLDEST else temperature,
            top_p=self._default("top_p", sampling.top_p, 1.0),
            top_k=max(0, int(self._default("top_k", sampling.top_k, 0))),
            min_p=self._default("min_p", sampling.min_p, 0.0),
            presence_penalty=sampling.presence_penalty or 0.0,
            frequency_penalty=sampling.frequency_penalty or 0.0,
            repetition_penalty=self._default(
                "repetition_penalty", sampling.repetition_penalty, 1.0
            ),
            logit_bias=biases,
            min_tokens=min_tokens,
            seed=seed,
            ignore_eos=bool(sampling.ignore_eos),
            stop_token_ids=stop_token_ids,
            logprobs=min(wishes.logprobs, self._vocab_size),
            prompt_logprobs=min(wishes.prompt_logprobs, self._vocab_size),
        )

    def _default(self, field: str, given: float | None, neutral: float) -> float:
        """What the client gave, else what the model's makers recommend."""
        return given if given is not None else self._model.sampling_defaults.get(field, neutral)

    def _max_tokens(self, prompt_len: int, wishes: Wishes) -> int:
        if wishes.max_tokens is not None:
            wanted = max(1, wishes.max_tokens)
            self._room(prompt_len, wanted, wishes.prompt_param, wishes.max_tokens_param)
            return wishes.max_tokens
        room = self._room(prompt_len, 1, wishes.prompt_param, wishes.prompt_param)
        default = wishes.default_max_tokens
        return room if default is None else min(room, max(default, wishes.min_tokens or 0))

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

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises BadRequest for one that the model does not know."""
        size = self._vocab_size
        bad = next((each for each in ids if not 0 <= each < size), None)
        if bad is not None:
            raise BadRequest(
                f"{param}: token id {bad} is not in the vocabulary (0 to {size - 1})",
                param=param,
                code="invalid_token_id",
            )
