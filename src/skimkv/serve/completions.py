"""POST /v1/completions: the form of its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .pieces import Piece, Text
from .worker import Ended

Event = dict[str, Any]


def sse(event: Event) -> str:
    """Write an event of a stream as clients read it."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


def usage(ends: Collection[Ended]) -> dict[str, Any]:
    """Return the numbers of tokens of all prompts of a request, and of the answers so far."""
    read, new = sum(end.prompt_tokens for end in ends), sum(end.new_tokens for end in ends)
    return {
        "prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(end.reused_tokens for end in ends)},
    }  # fmt: skip


class Form:
    """What the answers to completions and to chats have in common: an end, counts where the request asks for them.

    head: of every object and event. ends: how the answers ended, by their indices.
    """

    last_words = "data: [DONE]\n\n"

    def __init__(self, head: Event, body: Mapping[str, Any]) -> None:
        self.head = head
        self.counts_in_stream = bool(body.get("stream_options", {}).get("include_usage"))
        self.ends: dict[int, Ended] = {}

    def finish(self) -> Iterator[Event]:
        """Yield the events after all answers."""
        if self.counts_in_stream:
            yield {**self.head, "choices": [], "usage": usage(self.ends.values())}

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the events that tell of an error."""
        yield error

    def write(self, event: Event) -> str:
        """Write an event of the stream."""
        return sse(event)

    def event_of(self, choice: dict[str, Any]) -> Event:
        """Make the event with a part of an answer."""
        counts = {"usage": None} if self.counts_in_stream else {}
        return {**self.head, "choices": [choice], **counts}


class Completion(Form):
    """Puts the answers to a request together, as one object or as the events of a stream.

    model: the name under which it is served.
    """

    def __init__(self, model: str, body: Mapping[str, Any]) -> None:
        made = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        super().__init__({**made, "model": model}, body)
        self.texts: dict[int, str] = {}

    def start(self) -> Iterator[Event]:
        """Yield the events before the first piece."""
        yield from ()

    def add(self, index: int, piece: Piece | Ended) -> Iterator[Event]:
        """Take the next piece of the answer to a prompt, and yield its events. Those of several answers may mix."""
        if isinstance(piece, Ended):
            self.ends[index] = piece
            yield self.event_of(_choice(index, "", _reason(piece)))
        elif isinstance(piece, Text):
            self.texts[index] = self.texts.get(index, "") + piece
            yield self.event_of(_choice(index, piece, None))

    def whole(self) -> dict[str, Any]:
        """Return the answers as one object."""
        choices = [_choice(i, self.texts.get(i, ""), _reason(end)) for i, end in sorted(self.ends.items())]
        return {**self.head, "choices": choices, "usage": usage(self.ends.values())}


def _reason(end: Ended) -> str:
    return "length" if end.by_length else "stop"


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
