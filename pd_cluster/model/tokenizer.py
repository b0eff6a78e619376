"""Text to token ids and back, and chat messages to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pd_cluster.errors import ModelError
from pd_cluster.model.chat_template import ChatTemplate
from pd_cluster.model.json_file import read_json
from pd_cluster.model.token_bytes import token_bytes

# What a tokenizer's decoder puts where bytes are not (or not yet) a character.
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a model folder (tokenizer.json, and the chat template where there is one).

    `chat_template` is the name of one of the model's templates, or a file that holds another one.
    Raises ModelError when the folder has no readable tokenizer.json, or for an unknown template.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder}: tokenizer.json is missing")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
        # Limits of training; a request's length is for the server to judge.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        path = folder / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        self._special = {
            key: text
            for key in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(settings.get(key))) is not None
        }
        self._template = _template(folder, settings, chat_template)
        # Some models have another one for when there are tools, as transformers knows.
        named = chat_template is None and "tool_use" in _templates(folder, settings)
        self._tool_template = _template(folder, settings, "tool_use") if named else self._template

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._tool_template.knows_tools

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of sequence; the model's config may know more."""
        eos = self._special.get("eos_token")
        token_id = None if eos is None else self._tokenizer.token_to_id(eos)
        return () if token_id is None else (token_id,)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, maybe part of a character only; empty for an id without one."""
        spelling = self._tokenizer.id_to_token(token_id) or ""
        return token_bytes(spelling, byte_level="ByteLevel" in str(self._tokenizer.decoder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode` this lets other threads go on meanwhile, seconds for megabytes.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt's token ids for `messages` (each with "role" and "content").

        Raises BadRequest when the model has no template or the template refuses the messages.
        """
        template = self._tool_template if tools else self._template
        text = template.render(messages, self._special, add_generation_prompt, tools)
        return self.encode(text, add_special_tokens=False)


class IncrementalDetokenizer:
    """Text of one sequence, as its tokens come.

    A character whose bytes are spread over tokens is held back until it is whole. The texts that
    `feed` and `flush` gave, joined, are `Tokenizer.decode` of all the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The last tokens, decoded together: `_context` of them, whose text is out, lend the rest
        # what comes before it (a leading space depends on it in some tokenizers).
        self._window: list[int] = []
        self._context = 0
        self._emitted = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._emitted :]
        if len(whole) == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        else:
            self._emitted = max(self._emitted, len(whole))
        return new

    def flush(self) -> str:
        """The rest; what never became a character is U+FFFD. Call it once, at the end."""
        return self._decode(self._window)[self._emitted :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _token_text(value: Any) -> str | None:
    """Tokens stand there as a string, or as an object with the string in `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template(folder: Path, settings: Mapping[str, Any], chosen: str | None) -> ChatTemplate:
    found = _templates(folder, settings)
    if chosen is None:
        text, source = found.get("default", (None, folder))
    elif chosen in found:
        text, source = found[chosen]
    else:
        source = Path(chosen).expanduser()
        if not source.is_file():
            names = ", ".join(found) or "none"
            raise ModelError(
                f"chat template {chosen}: no such file, nor one of the model's templates ({names})"
            )
        try:
            text = source.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat template {chosen}: {error}") from error
    return ChatTemplate(text, source=str(source))


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, Path]]:
    """By name: the text, and where it stands. transformers has kept them in three places."""
    path = folder / "tokenizer_config.json"
    inline = settings.get("chat_template")
    if isinstance(inline, list):  # several by name
        found = {each["name"]: (each["template"], path) for each in inline}
    else:
        found = {} if inline is None else {"default": (inline, path)}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = (path.read_text(), path)
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = (path.read_text(), path)
    return found
