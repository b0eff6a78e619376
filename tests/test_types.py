"""Messages survive the wire, and what is no message is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.errors import InvalidTransition, WireError
from pd_cluster.states import Tracked
from pd_cluster.types import (
    AttemptId,
    CancelAttempt,
    FirstToken,
    Sources,
    decode,
    encode,
    pack_ints,
    unpack_ints,
)

FIRST = FirstToken(
    attempt=AttemptId("r", 1),
    token=5,
    sources=Sources(computed=3, prefill_hit=4),
    queue_s=0.5,
    prefill_s=1.5,
)


def test_round_trip() -> None:
    assert decode(encode(FIRST), FirstToken) == FIRST
    assert decode(encode(FIRST), (CancelAttempt, FirstToken)) == FIRST


def test_an_unexpected_message_names_both() -> None:
    with pytest.raises(WireError, match="FirstToken; expected CancelAttempt"):
        decode(encode(FIRST), CancelAttempt)


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, FirstToken)


def test_wrong_field_types_are_a_wire_error() -> None:
    bad = {**msgspec.to_builtins(FIRST), "token": "five"}
    with pytest.raises(WireError, match="token"):
        decode(msgspec.msgpack.encode(bad), FirstToken)


@given(st.lists(st.integers(min_value=-(2**31), max_value=2**31 - 1)))
def test_ints_round_trip(values: list[int]) -> None:
    assert np.array_equal(unpack_ints(pack_ints(values)), np.array(values, np.int32))


def test_ints_of_a_torn_message() -> None:
    with pytest.raises(WireError, match="5 bytes"):
        unpack_ints(b"12345")


def test_an_illegal_move_tells_the_story() -> None:
    light: Tracked[str] = Tracked("light", "red", {("red", "green"): "go"}, 0.0)
    light.move("green", 1.0)
    with pytest.raises(
        InvalidTransition, match=r"(?s)light: no transition from 'green' to 'red'.*go"
    ):
        light.move("red", 2.0)
