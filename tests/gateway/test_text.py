from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.gateway.text import TextOptions, TextStream

EOS = 257


@pytest.fixture(scope="module")
def run(tokenizer):
    def run(text: str, stops: list[str], size: int = 1) -> tuple[list[str], str | None]:
        stream = TextStream(tokenizer, TextOptions(stops=tuple(stops)), {EOS})
        ids = tokenizer.encode(text)
        out = [stream.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
        return [*out, stream.flush()], stream.matched

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "wanted", "matched"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("one two three", ["three", "two"], "one ", "two"),
        ("aaab", ["aab"], "a", "aab"),
        ("aab", ["aaab"], "aab", None),
        ("end", ["ending"], "end", None),
        ("héé€llo", ["€"], "héé", "€"),
        ("x🌍y", ["🌍y"], "x", "🌍y"),
        ("stop", ["stop"], "", "stop"),
        ("abcabd", ["abd"], "abc", "abd"),
    ],
)
def test_nothing_from_a_stop_string_on(run, text, stops, wanted, matched, size):
    pieces, found = run(text, stops, size)
    assert "".join(pieces) == wanted
    assert found == matched


def test_only_what_may_be_a_stop_string_is_held_back(run):
    pieces, _ = run("a<b<|c", ["<|end|>"])
    assert pieces == ["a", "", "<b", "", "", "<|c", ""]


def test_characters_are_whole(run):
    pieces, _ = run("wörld 🌍", [])
    assert pieces == ["w", "", "ö", "r", "l", "d", " ", "", "", "", "🌍", ""]


def test_an_end_token_has_no_text(tokenizer):
    stream = TextStream(tokenizer, TextOptions(), {ord("b") - 33})
    assert tokenizer.encode("b") == [ord("b") - 33]
    assert stream.feed(tokenizer.encode("ab")) + stream.flush() == "a"


def test_broken_characters_come_out_at_the_end(tokenizer):
    stream = TextStream(tokenizer, TextOptions(stops=("zzz",)), set())
    broken = tokenizer.encode("🌍")[:2]
    assert stream.feed(broken) == ""
    assert "\ufffd" in stream.flush()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abé🌍", max_size=20),
    stops=st.lists(st.text(alphabet="abé🌍", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 5),
)
def test_any_split_gives_the_same_text(run, text, stops, size):
    pieces, matched = run(text, stops, size)
    shown = "".join(pieces)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matched)
