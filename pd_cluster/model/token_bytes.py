"""What single tokens stand for, in bytes: many are parts of a character only."""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies spell bytes with (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + index): byte for index, byte in enumerate(others)},
    }


_ALPHABET = _byte_alphabet()


def token_bytes(spelling: str, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary's entry.

    `byte_level` vocabularies spell bytes by characters of their own; the others (SentencePiece's)
    spell a space as U+2581 and single bytes as <0xE2>. Special tokens are what they read.
    """
    if byte_level:
        try:
            return bytes(_ALPHABET[char] for char in spelling)
        except KeyError:  # a special token, which is not spelt by bytes
            return spelling.encode()
    if match := _BYTE_TOKEN.fullmatch(spelling):
        return bytes([int(match[1], 16)])
    return spelling.replace("\u2581", " ").encode()
