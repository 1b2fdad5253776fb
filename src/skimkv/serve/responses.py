"""POST /v1/responses: the form of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from .completions import Event, sse
from .pieces import Piece, Reasoning, Text, ToolCall
from .worker import Ended

ECHOED = "instructions", "temperature", "top_p", "max_output_tokens", "metadata", "user"


class Response:
    """Puts a response together, item by item, as one object or as the events of a stream.

    model: the name under which it is served.
    """

    last_words = ""

    def __init__(self, model: str, body: Mapping[str, Any]) -> None:
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None,
            "tools": body.get("tools", []), "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": True, "store": False, "text": {"format": {"type": "text"}}, "truncation": "disabled",
            **{name: body.get(name) for name in ECHOED},
        }  # fmt: skip
        self.number = 0  # of the next event
        self.is_open = False  # whether the last item of the output goes on

    def start(self) -> Iterator[Event]:
        """Yield the events before the first piece."""
        yield self._event("response.created", response=self._copy())
        yield self._event("response.in_progress", response=self._copy())

    def add(self, index: int, piece: Piece | Ended) -> Iterator[Event]:
        """Take the next piece of the answer, and yield its events. A response has one answer, so the index is 0."""
        if isinstance(piece, Ended):
            yield from self._end(piece)
        elif isinstance(piece, ToolCall):
            yield from self._close()
            yield from self._call(piece)
        else:
            yield from self._write(piece)

    def finish(self) -> Iterator[Event]:
        """Yield the events after the answer."""
        yield self._event(f"response.{self.response['status']}", response=self._copy())

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the events that tell of an error."""
        told = error["error"]
        yield self._event("error", code=told["code"] or told["type"], message=told["message"], param=told["param"])
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": told["message"]}}
        yield self._event("response.failed", response=self._copy())

    def whole(self) -> dict[str, Any]:
        """Return the response as one object."""
        return self.response

    def write(self, event: Event) -> str:
        """Write an event of the stream."""
        return f"event: {event['type']}\n{sse(event)}"

    def _event(self, kind: str, **fields: Any) -> Event:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **fields}

    def _copy(self) -> dict[str, Any]:
        return {**self.response, "output": list(self.response["output"])}

    @property
    def _item(self) -> dict[str, Any]:
        return self.response["output"][-1]  # type: ignore[no-any-return]

    def _place(self) -> dict[str, Any]:
        """Where the last item stands, as events say it."""
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _added(self, item: dict[str, Any]) -> Event:
        self.response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._place()["output_index"], item=dict(item))

    def _done(self) -> Event:
        return self._event("response.output_item.done", output_index=self._place()["output_index"], item=self._item)

    def _write(self, piece: Text | Reasoning) -> Iterator[Event]:
        """Add to the last item, or begin one."""
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        if self.is_open and self._item["type"] != kind:
            yield from self._close()
        if not self.is_open:
            yield from self._open(kind)
        part = self._item["content"][0]
        part["text"] += piece
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part['type']}.delta", **self._place(), content_index=0, delta=piece, **extra)

    def _open(self, kind: str) -> Iterator[Event]:
        """Begin an item that has one part, a text."""
        unique = uuid.uuid4().hex
        if kind == "message":
            item: dict[str, Any] = {"id": f"msg_{unique}", "type": kind, "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item, part = {"id": f"rs_{unique}", "type": kind, "summary": []}, {"type": "reasoning_text", "text": ""}
        yield self._added({**item, "status": "in_progress", "content": []})
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))
        self._item["content"] = [part]
        self.is_open = True

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the last item, if it goes on."""
        if not self.is_open:
            return
        part = self._item["content"][0]
        extra: dict[str, Any] = {"logprobs": []} if self._item["type"] == "message" else {}
        yield self._event(f"response.{part['type']}.done", **self._place(), content_index=0, text=part["text"], **extra)
        yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        self._item["status"] = status
        yield self._done()
        self.is_open = False

    def _call(self, call: ToolCall) -> Iterator[Event]:
        unique = uuid.uuid4().hex
        item = {"id": f"fc_{unique}", "type": "function_call", "call_id": f"call_{unique}", "name": call.name}
        yield self._added({**item, "arguments": "", "status": "in_progress"})
        arguments = call.arguments
        yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
        yield self._event("response.function_call_arguments.done", **self._place(), name=call.name, arguments=arguments)
        self._item.update(arguments=arguments, status="completed")
        yield self._done()

    def _end(self, end: Ended) -> Iterator[Event]:
        """Close the response. One that has nothing else has an empty message."""
        if not self.response["output"]:
            yield from self._open("message")
        status = "incomplete" if end.by_length else "completed"
        yield from self._close(status)
        read, new = end.prompt_tokens, end.new_tokens
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if end.by_length else None
        self.response["usage"] = {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": end.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": new, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + new,
        }  # fmt: skip
