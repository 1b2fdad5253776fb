"""The text of an answer, piece by piece: tokens become text, which ends before a stop string, and is parsed.

A parser tells apart what a model writes for its reader, its reasoning, and its calls of tools. The Transformers library
knows how models mark these; what it has no public name for is used in this file only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from transformers.cli.serving.utils import get_response_template

from ..hf.token_text import TokenText

REASONING = "reasoning_content", "thinking", "reasoning"  # what templates call it


class Text(str):
    """A piece of the answer itself."""


class Reasoning(str):
    """A piece of what the model writes before its answer."""


class ToolCall(NamedTuple):
    """A function that the model calls, and its arguments, a JSON object."""

    name: str
    arguments: str


Piece = Text | Reasoning | ToolCall


class Writer:
    """Makes the pieces of one answer from its tokens, and hands each on as soon as no later token can change it.

    stops: strings before the first of which the text ends. parser: None if everything is text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], parser: Any, put: Callable[[Piece], None]) -> None:
        self.stops, self.parser, self.put = stops, parser, put
        self.stopped = False
        # a parser finds its marks among the special tokens
        self._text = TokenText(tokenizer, skip_special_tokens=parser is None)
        self._held = ""  # text that could be the beginning of a stop string
        self._parses = parser is not None
        self._unparsed = ""  # what the parser was given and has not made a piece of
        if parser is not None:
            for piece in [piece for event in parser.initial_events for piece in self._pieces(event)]:
                put(piece)

    def add(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens, and return whether the answer has ended at a stop string."""
        for token in tokens:
            if not self.stopped:
                self._add_text(self._text.add(token))
        return self.stopped

    def end(self) -> None:
        """Hand on what was held back, because no token follows."""
        if not self.stopped:
            self._add_text(self._text.end())
        if not self.stopped:
            self._put_text(self._held)
        if self._parses:
            self._parse(None)

    def _add_text(self, text: str) -> None:
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped, ready = True, min(places)
        else:
            ready = len(self._held) - max((_overlap(self._held, stop) for stop in self.stops), default=0)
        self._put_text(self._held[:ready])
        self._held = self._held[ready:]

    def _put_text(self, text: str) -> None:
        if text and self._parses:
            self._parse(text)
        elif text and (plain := self._plain(text)):
            self.put(Text(plain))

    def _plain(self, text: str) -> str:
        """The text without the marks for which a parser looks, where there was one."""
        return text if self.parser is None else self._special_tokens.sub("", text)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        names = getattr(self._text.tokenizer, "all_special_tokens", [])  # a tokenizer may have thousands
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _parse(self, text: str | None) -> None:
        """Put the pieces of more text; None is the end. A call of a tool that cannot be read is text like any other."""
        self._unparsed += text or ""
        try:
            events = self.parser.finalize()[1] if text is None else self.parser.feed(text)
            pieces = [piece for event in events for piece in self._pieces(event)]
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
            self._parses = False
            pieces, plain = [], self._plain(self._unparsed)
            if plain:
                self.put(Text(plain))
        for piece in pieces:
            self.put(piece)
            # the marks before a text are of no piece; those after it may begin one
            if not isinstance(piece, ToolCall) and piece in self._unparsed:
                self._unparsed = self._unparsed.split(piece, 1)[1]

    def _pieces(self, event: dict[str, Any]) -> Iterator[Piece]:
        name, text = event.get("field"), event.get("text")
        if name == "tool_calls":
            if event["type"] == "region_close":
                yield _tool_call(event["value"]["function"])
                self._unparsed = ""
        elif event["type"] == "region_chunk" and text and name in (*REASONING, "content"):
            yield Text(text) if name == "content" else Reasoning(text)


def _tool_call(function: dict[str, Any]) -> ToolCall:
    """The call that a parser found. Raises ValueError if it has no name, or arguments that are no object of JSON."""
    name, arguments = function.get("name"), function.get("arguments")
    arguments = {} if arguments is None else json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    json.dumps([name, arguments], ensure_ascii=False).encode()  # no half of a surrogate pair
    return ToolCall(name, json.dumps(arguments, allow_nan=False))


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def response_parser(tokenizer: Any, model: Any, prompt: Sequence[int], tools: list[Any] | None) -> Any:
    """Return the parser of a chat's answer to a prompt, or None if the library knows no marks of this model.

    The prompt may end with the beginning of the answer, after the mark that begins it. Where that mark does not come,
    because the chat template is another one, the prompt is no part of the answer. Without tools no call is looked for.
    """
    template = get_response_template(tokenizer, model)
    if template is None:
        return None
    if tools is None:
        fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
        template = {**template, "fields": fields}
    text, marks = tokenizer.decode(prompt), template.get("start_anchor", [])
    patterns = [re.escape(mark) for mark in ([marks] if isinstance(marks, str) else marks)]
    patterns += [template["start_anchor_pattern"]] if "start_anchor_pattern" in template else []
    begins = any(re.search(pattern, text) for pattern in patterns)
    return tokenizer.get_response_parser(template, prefix=text if begins else "", tools=tools)
