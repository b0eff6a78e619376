"""The bodies of SGLang's native routes."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from pd_cluster.errors import BadRequest
from pd_cluster.gateway.protocol import Body, Prompt, Sampling, Seed, prompt_list


class NativeSampling(Sampling):
    absent = {
        "n": (None, 1),
        "min_new_tokens": (None, 0),
        "min_p": (None, 0),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "logit_bias": (None, {}),
        "json_schema": (None,),
        "regex": (None,),
        "ebnf": (None,),
        "stop_regex": (None, []),
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "no_stop_trim": (None, False),
    }

    max_new_tokens: int | None = Field(None, ge=1)
    sampling_seed: Seed | None = None


class NativeBody(Body):
    """SGLang's /generate: exactly one of `text` and `input_ids`, single or a list.

    `rid` is what the answer calls itself, and nothing else.
    """

    absent = {
        "return_logprob": (None, False),
        "return_hidden_states": (None, False),
        "return_text_in_logprobs": (None, False),
        "logprob_start_len": (None, -1),
        "top_logprobs_num": (None, 0),
        "image_data": (None,),
        "input_embeds": (None,),
        "lora_path": (None,),
        "session_params": (None,),
        "priority": (None, 0),
    }

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool = False
    rid: str | list[str] | None = None
    extra_key: str | None = Field(None, min_length=1, max_length=256)

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
