"""The tokenizer against transformers', chat templates, and text that streams whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pd_cluster.errors import BadRequest, ModelError
from pd_cluster.model.tokenizer import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "Hello, world!",
    "  12 monkeys,   3.14159 and\n\n\tdef f(x):\n        return x  # 2023",
    "Ünïcödé naïve café",
    "春眠暁を覚えず 처처에 새소리 夜来風雨声",
    "👩‍👩‍👧‍👦 family, 🎉🎉 party, 🏳️‍🌈 flag, 🤷🏽‍♀️",
    "don't we'll I'M they'RE",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@pytest.fixture(scope="module")
def upstream(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(
    tokenizer: Tokenizer, upstream: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == upstream.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == upstream.decode(ids, skip_special_tokens=True)


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    """As the model was trained: also the space before one belongs to what stands before it."""
    for text in ["12345", "    5", "a 1  2"]:
        for token in tokenizer.encode(text):
            piece = tokenizer.decode([token])
            assert not any(char.isdigit() for char in piece) or len(piece) == 1


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief. 簡潔に。"},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "Hello! 🎉"},
        {"role": "user", "content": "Bye"},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chat_template_as_transformers(
    tokenizer: Tokenizer, upstream: Any, messages: list[dict[str, str]], generate: bool
) -> None:
    ours = tokenizer.apply_chat_template(messages, add_generation_prompt=generate)
    theirs = upstream.apply_chat_template(
        messages, add_generation_prompt=generate, return_dict=False
    )
    assert ours == theirs


def test_sizes_and_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": None}, "chat template: can only concatenate str"),
        ({"role": "user", "content": [{"type": "text"}]}, "chat template: can only concatenate"),
        ({"role": "user"}, "chat template: .* has no attribute 'content'"),
    ],
)
def test_messages_that_the_template_cannot_take(
    tokenizer: Tokenizer, message: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        tokenizer.apply_chat_template([message])
    assert caught.value.param == "messages"


def small(folder: Path, **files: str) -> Tokenizer:
    """A tokenizer of four words with these further files, by stem of their name."""
    raw = RawTokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    raw.save(str(folder / "tokenizer.json"))
    names = {"config": "tokenizer_config.json", "template": "chat_template.jinja"}
    for stem, text in files.items():
        (folder / names[stem]).write_text(text)
    return Tokenizer(folder)


def test_template_names(tmp_path: Path) -> None:
    """What templates may use: special tokens, tojson, generation blocks, loop controls."""
    template = (
        "{%- for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}"
    )
    config = json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    tokenizer = small(tmp_path, config=config, template=template)
    text = tokenizer._template.render([{"role": "ü"}, {"role": "x"}], tokenizer._special, True)
    assert text == '{"role": "ü"}</s>'
    assert tokenizer.eos_token_ids == (3,)


# In the manner of Qwen's and Hermes' templates.
TOOLS = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{- '\n' + message.content if message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}"""  # noqa: E501


@pytest.mark.parametrize("with_tools", [True, False])
def test_tools_are_rendered_as_by_transformers(
    smollm2: Path, tmp_path: Path, upstream: Any, with_tools: bool
) -> None:
    path = tmp_path / "tools.jinja"
    path.write_text(TOOLS)
    ours = Tokenizer(smollm2, str(path))
    assert ours.knows_tools
    assert not Tokenizer(smollm2).knows_tools
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Wie's ist, <überall>", "parameters": parameters}
    tools = [{"type": "function", "function": function}] if with_tools else []
    call = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
    messages = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    theirs = upstream.apply_chat_template(
        messages, tools=tools or None, chat_template=TOOLS, tokenize=False
    )
    rendered = ours.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
    assert ours.decode(rendered, skip_special_tokens=False) == theirs
    assert ("# Tools" in theirs) == with_tools


def test_a_template_that_refuses(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="^chat template: roles must alternate$"):
        small(tmp_path, template=template).apply_chat_template([])


def test_a_template_may_not_leave_its_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(BadRequest, match="unsafe"):
        small(tmp_path, template=template).apply_chat_template([])


def test_templates_by_name_in_the_settings(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "b"}, {"name": "default", "template": "a"}]
    tokenizer = small(tmp_path, config=json.dumps({"chat_template": named}))
    assert tokenizer.apply_chat_template([]) == [0]


def test_a_template_of_the_users_choice(tmp_path: Path) -> None:
    """Three words of the vocabulary, each the whole of one template."""
    settings = json.dumps({"chat_template": [{"name": "tool_use", "template": "b"}]})
    small(tmp_path, config=settings, template="a")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("<s>")
    own = tmp_path / "own.jinja"
    own.write_text("</s>")
    expected = {None: 0, "default": 0, "tool_use": 1, "rag": 2, str(own): 3}
    for chosen, token in expected.items():
        assert Tokenizer(tmp_path, chosen).apply_chat_template([]) == [token]
    for chosen, message in {
        "tools": r"chat template tools: no such file, nor one .* \(tool_use, rag, default\)",
        str(tmp_path): "no such file",
    }.items():
        with pytest.raises(ModelError, match=message):
            Tokenizer(tmp_path, chosen)
    own.write_text("{% for %}")
    with pytest.raises(ModelError, match=r"own\.jinja: chat template: Expected"):
        Tokenizer(tmp_path, str(own))
    own.write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat template .*own\.jinja: .* can't decode"):
        Tokenizer(tmp_path, str(own))


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        small(tmp_path).apply_chat_template([])


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    with pytest.raises(ModelError, match="chat_template.jinja: chat template: Expected"):
        small(tmp_path, template="{% for %}")
    (tmp_path / "chat_template.jinja").unlink()
    for config, message in {"{": "is not JSON", "[]": "expected an object"}.items():
        with pytest.raises(ModelError, match=rf"tokenizer_config\.json.*{message}"):
            small(tmp_path, config=config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer(tmp_path)


# --- streaming -----------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.integers(1, 4))
def test_random_tokens_stream_to_the_same_text(
    tokenizer: Tokenizer, ids: list[int], step: int
) -> None:
    assert "".join(stream(tokenizer, ids, step)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(TEXTS), st.integers(1, 3))
def test_texts_stream_whole(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, step)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:  # the vocabulary lacks some bytes of rare characters
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab 🎉c")
    pieces = stream(tokenizer, ids)
    assert pieces.count("🎉") == 1
    assert pieces.index("🎉") > len(tokenizer.encode("ab ")) > 0
    assert pieces[-2:] == ["c", ""]


def test_what_never_becomes_a_character(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("🎉")[0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed([first]) == ""
    assert detokenizer.feed([]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_can_be_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert "".join(stream(tokenizer, ids)) == "ab"
    keeping = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(keeping.feed([token]) for token in ids) == "a<|im_end|>b"


def test_spaces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """There the first token of a text loses its space, so text depends on what came before."""
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [0, 1, 2, 3, 4, 5, 1, 0]
    assert stream(tokenizer, ids) == ["a", " b", "c", "", "", "€", " b", " a", ""]
