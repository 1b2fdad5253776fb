"""What a request may ask for: the checks that the library's handlers leave out, each with one line that says why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

GREATEST_NUMBER = 2**31


def check_request(body: dict[str, Any]) -> None:
    """Raise ValueError, in one line that names the field, if a field of a request cannot be what it is."""
    for name, check in CHECKS.items():
        if body.get(name) is not None and (reason := check(body[name])) is not None:
            shown = json.dumps(body[name], default=str)
            raise ValueError(f"{name} = {shown if len(shown) <= 60 else shown[:57] + '...'} {reason}")


def require(body: dict[str, Any], *names: str) -> None:
    """Raise ValueError unless the request has one of these fields."""
    if all(body.get(name) is None for name in names):
        raise ValueError(f"the request has no {' or '.join(names)}")


def _number(low: float, high: float) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        """Say what is wrong with a number, or nothing."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return None if is_number and low <= value <= high else f"must be a number from {low:g} to {high:g}"

    return check


def _whole(low: int, high: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        """Say what is wrong with a whole number, or nothing."""
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return None if is_whole and low <= value <= high else f"must be a whole number from {low} to {high}"

    return check


def _texts(value: Any) -> str | None:
    texts = value if isinstance(value, list) else [value]
    whole = all(isinstance(text, str) and text for text in texts)
    return None if whole and texts else "must be a text that is not empty, or a list of such texts"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a text"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _messages(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of messages that is not empty"
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "must be a list of objects with a role"
        content, calls = message.get("content"), message.get("tool_calls")
        parts = content if isinstance(content, list) else []
        if not (content is None or isinstance(content, str | list)) or not all(map(_is_part, parts)):
            return "has a message whose content is neither a text nor a list of parts with a type and a text"
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            return "has a message whose tool_calls are no list of functions with a name and arguments"
    return None


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _objects(value: Any) -> str | None:
    whole = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return None if whole else "must be a list of objects"


def _bias(value: Any) -> str | None:
    whole = isinstance(value, dict) and all(token.isdecimal() for token in value)
    whole = whole and all(_number(-100, 100)(bias) is None for bias in value.values())
    return None if whole else "must be an object from token numbers to numbers from -100 to 100"


def _json_object(value: Any) -> str | None:
    try:
        whole = isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        whole = False
    return None if whole else "must be a text that holds a JSON object"


def _object(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object"


def _only(*values: Any) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        """Say that nothing else is supported, where the library would ignore the field."""
        known = any(value == other and type(value) is type(other) for other in values)
        return None if known else f"is not supported; leave it out, or write {json.dumps(values[0])}"

    return check


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "model": _text,
    "prompt": _text,
    "suffix": _text,
    "messages": _messages,
    "stream": _flag,
    "stop": _texts,
    "max_tokens": _whole(1, GREATEST_NUMBER),
    "max_completion_tokens": _whole(1, GREATEST_NUMBER),
    "max_output_tokens": _whole(1, GREATEST_NUMBER),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "frequency_penalty": _number(-0.99, 2),
    "seed": _whole(-(2**63), 2**63 - 1),
    "logit_bias": _bias,
    "tools": _objects,
    "chat_template_kwargs": _object,
    "generation_config": _json_object,
    # what the library would ignore without a word, although it asks for another answer
    "n": _only(1),
    "best_of": _only(1),
    "echo": _only(False),
    "logprobs": _only(False, 0),
    "top_logprobs": _only(0),
    "presence_penalty": _only(0, 0.0),
    "response_format": _only({"type": "text"}),
    "tool_choice": _only("auto"),
}
