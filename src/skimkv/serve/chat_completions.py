"""POST /v1/chat/completions: the form of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from .completions import Event, Form, usage
from .pieces import Piece, Reasoning, ToolCall
from .worker import Ended


class ChatCompletion(Form):
    """Puts the answer to a chat together, as one object or as the events of a stream.

    model: the name under which it is served.
    """

    def __init__(self, model: str, body: Mapping[str, Any]) -> None:
        made = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        super().__init__({**made, "object": "chat.completion.chunk"}, body)
        self.text, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []

    def start(self) -> Iterator[Event]:
        """Yield the events before the first piece."""
        yield self._event({"role": "assistant", "content": ""})

    def add(self, index: int, piece: Piece | Ended) -> Iterator[Event]:
        """Take the next piece of the answer, and yield its events. A chat has one answer, so the index is 0."""
        if isinstance(piece, Ended):
            self.ends[index] = piece
            yield self._event({}, self._reason())
        elif isinstance(piece, ToolCall):
            self.calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": piece._asdict()})
            yield self._event({"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]})
        elif isinstance(piece, Reasoning):
            self.reasoning += piece
            yield self._event({"reasoning_content": piece})
        else:
            self.text += piece
            yield self._event({"content": piece})

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        content = None if self.calls and not self.text else self.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason()}
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": usage(self.ends.values())}

    def _reason(self) -> str:
        return "length" if self.ends[0].by_length else "tool_calls" if self.calls else "stop"

    def _event(self, delta: dict[str, Any], reason: str | None = None) -> Event:
        return self.event_of({"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason})
