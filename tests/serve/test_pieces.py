"""The pieces of an answer: characters over several tokens, stop strings, reasoning, and calls of tools."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_parsing import ResponseParser

import skimkv
from skimkv.serve.generation import Answer, Prompt
from skimkv.serve.pieces import Reasoning, Text, ToolCall, Writer
from support.serving import Running, running


class Characters:
    """Stands for a tokenizer: a token is a byte of UTF-8, and bytes that are no character become U+FFFD."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


# The marks of Qwen's and Hermes' chat formats.
FORMAT: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


# The same with a pattern for the mark that opens a call, as Qwen's has.
CALLS = {k: v for k, v in FORMAT["fields"]["tool_calls"].items() if k != "open"} | {"open_pattern": r"\s*<tool_call>"}
PATTERN_FORMAT = {**FORMAT, "fields": {**FORMAT["fields"], "tool_calls": CALLS}}


def pieces_of(text: str, *stops: str, parsed: bool = False, format: dict[str, Any] = FORMAT) -> list[Any]:
    """The pieces of an answer that comes byte by byte; equal neighbours are joined."""
    found: list[Any] = []

    def put(piece: Any) -> None:
        if found and not isinstance(piece, ToolCall) and type(found[-1]) is type(piece):
            found[-1] = type(piece)(found[-1] + piece)
        else:
            found.append(piece)

    writer = Writer(Characters(), stops, ResponseParser(format, prefix="") if parsed else None, put)
    for byte in text.encode():
        if writer.add([byte]):
            break
    writer.end()
    return found


def test_characters_come_whole() -> None:
    found: list[str] = []
    writer = Writer(Characters(), (), None, found.append)  # type: ignore[arg-type]
    for byte in "aé😀 👩‍👩‍👧 z".encode():
        writer.add([byte])
    writer.end()
    assert found == list("aé😀 👩‍👩‍👧 z")
    writer = Writer(Characters(), (), None, found.append)  # type: ignore[arg-type]
    writer.add("😀".encode()[:3])
    writer.end()
    assert found[-1] == "\ufffd"  # as the tokenizer has it, when nothing follows


@pytest.mark.parametrize(
    ("text", "stops", "right"),
    [
        ("one two", (), "one two"),
        ("one two", ("tw",), "one "),
        ("one two", ("two", "e t"), "on"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("one tw", ("two",), "one tw"),
        ("é😀!", ("😀",), "é"),
        ("one two", ("o",), ""),
    ],
)
def test_stops(text: str, stops: tuple[str, ...], right: str) -> None:
    assert "".join(pieces_of(text, *stops)) == right


def test_nothing_is_held_longer_than_a_stop_string_may_begin() -> None:
    found: list[str] = []
    writer = Writer(Characters(), ["xyz"], None, found.append)  # type: ignore[arg-type]
    for byte, so_far in zip(b"axyb", ["a", "a", "a", "axyb"], strict=True):
        writer.add([byte])
        assert "".join(found) == so_far


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_reasoning_and_calls() -> None:
    add = ToolCall("add", '{"a": 1}')
    assert pieces_of(f"<think>so</think>hello{CALL}", parsed=True) == [Reasoning("so"), Text("hello"), add]
    assert pieces_of(f"{CALL}{CALL}", parsed=True) == [add, add]
    assert pieces_of("hello", parsed=True) == [Text("hello")]
    assert pieces_of("<think>so</think>hello", "ell", parsed=True) == [Reasoning("so"), Text("h")]
    without_arguments = '<tool_call>{"name": "now"}</tool_call>'
    assert pieces_of(without_arguments, parsed=True) == [ToolCall("now", "{}")]

    null = '<tool_call>{"name": "now", "arguments": null}</tool_call>'
    assert pieces_of(null, parsed=True) == [ToolCall("now", "{}")]
    as_text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert pieces_of(as_text, parsed=True, format=PATTERN_FORMAT) == [add]


BAD_ARGUMENTS = "[1]", "5", '"x"', '""', '{"a": NaN}', r'{"a": "\ud83d"}'
UNREADABLE = [
    "{nonsense}", "[1]", '{"arguments": {}}', '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}',
    *(f'{{"name": "add", "arguments": {value}}}' for value in BAD_ARGUMENTS),
]  # fmt: skip


@pytest.mark.parametrize("format", [FORMAT, PATTERN_FORMAT], ids=["a mark", "a pattern"])
@pytest.mark.parametrize("inside", UNREADABLE)
def test_a_call_that_cannot_be_read_is_text(inside: str, format: dict[str, Any]) -> None:
    broken = f"<tool_call>{inside}</tool_call>"
    for text in (broken, broken[:15], broken + " more", "before " + broken):
        found = pieces_of(text, parsed=True, format=format)
        assert all(isinstance(piece, Text) for piece in found) and "".join(found) == text


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model, tokenizer = skimkv.load("builtin")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools or '' }}"
    tokenizer.chat_template += "{% if starts %}<|im_start|>assistant\n<think>{% endif %}"
    tokenizer.response_template = FORMAT
    with running(model, tokenizer, "builtin", "Dense()") as started:
        yield started


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "a record"}]


def say(server: Running, monkeypatch: pytest.MonkeyPatch, text: str, at_end: bool = True) -> None:
    """Let the model say this text in every answer."""
    tokens = server.tokenizer(text, add_special_tokens=False).input_ids
    assert server.tokenizer.decode(tokens) == text

    def generate(prompt: Prompt, cancelled: threading.Event, take: Any) -> Answer:
        for token in tokens:
            take([token])
        return Answer(tokens, at_end, 0)

    monkeypatch.setattr(server.generator, "begin", lambda *request: None)  # so that none joins a batch
    monkeypatch.setattr(server.generator, "generate", generate)


def test_tools_in_chats(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    say(server, monkeypatch, f"<think>so</think>hello{CALL}")
    create = server.client.chat.completions.create
    answer = create(model="builtin", messages=MESSAGES, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "hello")
    assert answer.message.reasoning_content == "so"
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
    chunks = [chunk.choices[0] for chunk in create(model="builtin", messages=MESSAGES, tools=TOOLS, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "hello"
    (streamed,) = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "add", '{"a": 1}')
    assert chunks[-1].finish_reason == "tool_calls"
    say(server, monkeypatch, CALL[:-5], at_end=False)
    cut = create(model="builtin", messages=MESSAGES, tools=TOOLS).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None) and '"add"' in cut.message.content


def test_who_offers_no_tools_gets_no_calls(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    say(server, monkeypatch, f"hello{CALL}")
    for offered in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = server.request("/v1/chat/completions", {"messages": MESSAGES, **offered})[1]["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", f"hello{CALL}")
        assert "tool_calls" not in choice["message"]


def test_the_mark_of_the_end_is_no_text_after_a_call_that_cannot_be_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = server.tokenizer.eos_token
    say(server, monkeypatch, f"<tool_call>[1]</tool_call> more{end}")
    body = {"messages": MESSAGES, "tools": TOOLS}
    message = server.request("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert message["content"] == "<tool_call>[1]</tool_call> more"


def test_tools_in_responses(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    say(server, monkeypatch, f"<think>so</think>hello{CALL}")
    options = {"model": "builtin", "input": "a record", "tools": [{"type": "function", "name": "add"}]}
    answer = server.client.responses.create(**options)
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", "so", "hello")
    assert (call.type, call.name, call.arguments, answer.status) == ("function_call", "add", '{"a": 1}', "completed")
    events = list(server.client.responses.create(**options, stream=True))
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in events[-1].response.output]
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == done[event.output_index].id
    turn = [{"role": "user", "content": "a record"}, *(item.model_dump() for item in answer.output)]
    turn.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    assert server.client.responses.create(**{**options, "input": turn}).status == "completed"


def test_an_answer_that_the_template_begins(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt ends inside the reasoning; or it has other marks, and is no part of the answer."""
    say(server, monkeypatch, "so</think>hello")
    for starts, reasoning, content in ((True, "so", "hello"), (False, None, "so</think>hello")):
        body = {"messages": MESSAGES, "chat_template_kwargs": {"starts": starts}}
        message = server.request("/v1/chat/completions", body)[1]["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_without_tools_nothing_is_offered(server: Running) -> None:
    def prompt_tokens(**fields: Any) -> int:
        body = {"messages": MESSAGES, "max_tokens": 1, **fields}
        return int(server.request("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"])

    assert prompt_tokens() == prompt_tokens(tools=TOOLS, tool_choice="none") < prompt_tokens(tools=TOOLS)
