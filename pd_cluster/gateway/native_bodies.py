"""The bodies of SGLang's native routes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.protocol import (
    IDS_SCHEMA,
    MAX_TOP_LOGPROBS,
    TEXT_SCHEMA,
    Body,
    Namespace,
    Priority,
    Prompt,
    RoutingKey,
    Sampling,
    Seed,
    prompt_list,
)


class NativeSampling(Sampling):
    """`no_stop_trim` keeps the stop string in the text."""

    absent = {
        "json_schema": (None,),
        "regex": (None,),
        "ebnf": (None,),
        "stop_regex": (None, []),
        "spaces_between_special_tokens": (None, True),
    }

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    sampling_seed: Seed | None = None
    no_stop_trim: bool | None = None

    @model_validator(mode="after")
    def _one_seed(self) -> Self:
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise BadRequest("'seed' and 'sampling_seed' differ", param="sampling_seed")
        return self


class NativeBody(Body):
    """SGLang's /generate: exactly one of `text` and `input_ids`, single or a list.

    `rid` is what the answer calls itself, and nothing else. `timeout` (seconds) bounds the whole
    request. With `logprob_start_len` of 0 or more the prompt's tokens from there on get logprobs.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}
    )
    absent = {
        "return_hidden_states": (None, False),
        "image_data": (None,),
        "input_embeds": (None,),
        "lora_path": (None,),
        "session_params": (None,),
    }

    text: Annotated[str | list[str] | None, TEXT_SCHEMA] = None
    input_ids: Annotated[list[int] | list[list[int]] | None, IDS_SCHEMA] = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    extra_key: Namespace | None = None
    priority: Priority | None = None
    routing_key: RoutingKey | None = None
    timeout: float | None = Field(None, gt=0)

    @field_validator("text", "input_ids", mode="plain")
    @classmethod
    def _typed_prompts(cls, value: Any, info: Any) -> Any:
        kind = str if info.field_name == "text" else list
        if value is not None and not all(isinstance(each, kind) for each in prompt_list(value)):
            wanted = "a string or a list of strings" if kind is str else "a list of token ids"
            raise ValueError(f"must be {wanted}")
        return value

    @field_validator("sampling_params", mode="before")
    @classmethod
    def _default_sampling(cls, value: object) -> object:
        return NativeSampling() if value is None else value

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give exactly one of 'text' and 'input_ids'", param="text")
        names = self.rid if isinstance(self.rid, list) else [self.rid]
        if self.rid is not None and (
            isinstance(self.rid, list) != self.is_batch or len(names) != len(self.prompts)
        ):
            raise BadRequest("'rid' must be one string for each prompt", param="rid")
        if self.top_logprobs_num and not self.return_logprob:
            message = "'top_logprobs_num' needs 'return_logprob': true"
            raise BadRequest(message, param="top_logprobs_num")
        if self.logprob_start_len not in (None, -1) and not self.return_logprob:
            message = "'logprob_start_len' needs 'return_logprob': true"
            raise BadRequest(message, param="logprob_start_len")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return prompt_list(self.text if self.text is not None else self.input_ids)

    @property
    def is_batch(self) -> bool:
        """A list of prompts, be it of one, is answered by a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        assert self.input_ids is not None
        return isinstance(self.input_ids[0], list)

    @property
    def scores_from(self) -> int | None:
        """From which of the prompt's tokens on logprobs are wanted; None: of none."""
        start = self.logprob_start_len
        return start if start is not None and start >= 0 and self.return_logprob else None

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens to report with each token; -1: no logprobs."""
        return (self.top_logprobs_num or 0) if self.return_logprob else -1
