"""The coverage-guided fuzzer's program: libFuzzer's options and folders of inputs.

    python -m tests.transfer.fuzz.target -max_total_time=600 FOUND SEEDS

New inputs are kept in the first folder. On any exception, and on a write to memory that is no
region, it writes the input to `crash-...` and ends with a status that is not 0.
"""

from __future__ import annotations

import random
import resource
import sys
from typing import Any

import atheris
import msgspec

with atheris.instrument_imports(include=["pd_transfer"]):
    from pd_transfer.messages import Message, ProtocolError, Sealed, decode, encode
    from tests.transfer.fuzz.harness import Do, peer, play, step, steps, victim

_NUMBERS = (-1, 0, 1, 2, 3, 64, 65536, 1 << 42, 1 << 63, (1 << 64) - 1)
_PLACES = (*victim.regions, *peer.regions, *(place + victim.REGION for place in victim.regions))
_LONGEST = 0xFFFF
# Of address space; an input takes a quarter of it at most. More raises MemoryError.
_MEMORY = 1 << 30


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Half of the time as libFuzzer does; else steps change places, or a message one field."""
    rng = random.Random(seed)
    played = steps(data)
    if not played or rng.random() < 0.5:
        return bytes(atheris.Mutate(data, most))
    chosen = rng.randrange(len(played))
    do, payload = played[chosen]
    match rng.randrange(5):
        case 0:
            played.insert(rng.randrange(len(played) + 1), (do, payload))
        case 1:
            del played[chosen]
        case 2:
            played.insert(chosen, (Do(rng.randrange(len(Do))), bytes([rng.randrange(256)])))
        case _ if do == Do.FRAME:
            played[chosen] = (do, _altered(payload, rng))
        case _:
            played[chosen] = (do, bytes(atheris.Mutate(payload, _LONGEST)))
    return (data[:1] + b"".join(step(*each) for each in played))[:most]


def _altered(body: bytes, rng: random.Random) -> bytes:
    try:
        message = decode(body)
        if isinstance(message, Sealed):
            message = Sealed(b"", _altered(message.body, rng))
        else:
            message = _with_another_field(message, rng)
        return encode(message)[:_LONGEST]
    except (ProtocolError, OverflowError):
        return bytes(atheris.Mutate(body, _LONGEST))


def _with_another_field(message: Message, rng: random.Random) -> Message:
    fields = type(message).__struct_fields__
    if not fields:
        return message
    name = rng.choice(fields)
    value: Any = getattr(message, name)
    if isinstance(value, int):
        value = rng.choice([*_NUMBERS, value + 1, value - 1])
    elif isinstance(value, list):
        value = [rng.choice(_NUMBERS) for _ in range(rng.randrange(4))]
    elif isinstance(value, bytes) and len(value) >= 8 and rng.random() < 0.7:
        place = rng.randrange(len(value) // 8) * 8
        word = max(0, rng.choice([*_PLACES, *_NUMBERS]) + rng.randrange(-200, 200)) % (1 << 64)
        value = value[:place] + word.to_bytes(8, "little") + value[place + 8 :]
    elif isinstance(value, bytes):
        value = bytes(atheris.Mutate(value, len(value) + 16))
    elif value is None:
        value = b"n"
    else:
        value += "x"
    return msgspec.structs.replace(message, **{name: value})


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # In the place of libFuzzer's own limit, which is held against ru_maxrss: that is inherited from
    # the process that started this one, and a run of all tests has held gigabytes.
    program, *options = sys.argv
    atheris.Setup([program, "-rss_limit_mb=0", *options], play, custom_mutator=mutate)
    atheris.Fuzz()
