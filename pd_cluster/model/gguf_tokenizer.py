"""The tokenizer that a GGUF file describes by its vocabulary and merges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pd_cluster.errors import ModelError

_CONTROL_TOKEN, _USER_TOKEN = 3, 4

# How text is cut before the merges: GPT-4's way, with runs of so many digits.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(field: Callable[..., Any], source: str) -> Tokenizer:
    """The byte-level BPE tokenizer of a file's metadata.

    `field(key)` gives a value and raises ModelError where it is missing, unless a default is given
    too. Raises ModelError naming `source` for another kind of tokenizer.
    """
    kind = field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source}: tokenizer {kind!r} cannot be read from GGUF; use 'gpt2', or a folder of "
            f"safetensors with a tokenizer.json"
        )
    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in field("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    cut = field("tokenizer.ggml.pre", "default")
    tokenizer.pre_tokenizer = _pre_tokenizer(cut, source)
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_TOKEN
        ]
    )
    if field("tokenizer.ggml.add_bos_token", False):
        bos = tokens[field("tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = _prepend(bos, vocabulary[bos])
    return tokenizer


def special_tokens(field: Callable[..., Any]) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token, those that the file names."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    ids = {name: field(f"tokenizer.ggml.{key}", None) for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _pre_tokenizer(name: str, source: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges, by llama.cpp's name for it."""
    match name:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case "llama-bpe" | "qwen2":
            digits = "{1,3}" if name == "llama-bpe" else ""
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_CUT % digits), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
    raise ModelError(
        f"{source}: pre-tokenizer {name!r} is not supported; use gpt-2, smollm, llama-bpe or qwen2"
    )


def _prepend(token: str, token_id: int) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )
