"""What a request may ask for: a body becomes an object whose fields are checked, each with one line that says why."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..records import parse_object

GREATEST_NUMBER = 2**31
DEEPEST = 64  # objects and lists inside one another
MOST_STOPS = 16
MOST_PROMPTS = 128


class Refused(Exception):
    """A request that cannot be carried out: the status, one line that says why, the field's name, and a word for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.error = error_object(str(self), "invalid_request_error", param, code)


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Make the object with which OpenAI's clients are told of an error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds, without the fields that are null. Raises Refused if it is none."""
    try:
        parsed = json.loads(body, parse_constant=_not_a_number, parse_float=_finite)
    except RecursionError:
        raise Refused(f"the body has more than {DEEPEST} objects and lists inside one another") from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise Refused("the body must be a JSON object")
    for name, value in parsed.items():
        _check_inside("the body", name)
        _check_inside(name, value)
    return {name: value for name, value in parsed.items() if value is not None}


def _not_a_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} is greater than any floating-point number")
    return value


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise Refused(f"{name} has {half}, which is one half of a surrogate pair and no character", name) from None


def _check_inside(name: str, value: Any) -> None:
    """Check the texts and the depth of a field. Raises Refused."""
    layer, depth = [value], 1
    while layer := [part for part in layer if not isinstance(part, int | float)]:
        if depth > DEEPEST:
            raise Refused(f"{name} has more than {DEEPEST} objects and lists inside one another", name)
        below: list[Any] = []
        for part in layer:
            if isinstance(part, str):
                _check_text(part, name)
            elif isinstance(part, list):
                below += part
            elif isinstance(part, dict):
                below += part.keys()
                below += part.values()
        layer, depth = below, depth + 1


Check = Callable[[Any], str | None]  # says what is wrong with a value, or nothing


def check_request(body: Mapping[str, Any], checks: Mapping[str, Check], needed: str | None = None) -> None:
    """Raise Refused, in one line that names the field, for a field that cannot be what it is, or that is not used."""
    for name, value in body.items():
        if name in HARMLESS:
            continue
        if name not in checks:
            raise Refused(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
        try:
            reason = checks[name](value)
        except Refused as refused:  # of a text inside that holds JSON
            raise Refused(f"{name}: {refused}", name, "invalid_value") from None
        if reason is not None:
            raise Refused(f"{name} = {_shown(value)} {reason}", name, "invalid_value")
    if needed is not None and needed not in body:
        raise Refused(f"the request has no {needed}", needed, "missing_required_parameter")


def _shown(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _must_be(what: str, is_good: Callable[[Any], bool]) -> Check:
    """Make the check of a field whose values are good or not."""
    return lambda value: None if is_good(value) else f"must be {what}"


def _number(low: float, high: float) -> Check:
    return _must_be(f"a number from {low:g} to {high:g}", lambda value: _is_number(value, low, high))


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int) -> Check:
    return _must_be(f"a whole number from {low} to {high}", lambda value: _is_whole(value, low, high))


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and _is_number(value, low, high)


def _are_stops(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= MOST_STOPS and all(isinstance(text, str) and text for text in texts)


_stops = _must_be(f"a text that is not empty, or a list of at most {MOST_STOPS} such texts", _are_stops)
_text = _must_be("a text", lambda value: isinstance(value, str))
_flag = _must_be("true or false", lambda value: isinstance(value, bool))
_object = _must_be("an object", lambda value: isinstance(value, dict))


def _prompt(value: Any) -> str | None:
    prompts = list_of_prompts(value)
    if len(prompts) > MOST_PROMPTS:
        return f"must be at most {MOST_PROMPTS} prompts"
    good = all(isinstance(prompt, str) or _is_list_of_tokens(prompt) for prompt in prompts)
    return None if good and prompts else "must be a text, a list of tokens, or a list of such prompts"


def list_of_prompts(value: Any) -> list[Any]:
    """Return the prompts of a completion: texts, and lists of tokens."""
    return value if isinstance(value, list) and not _is_list_of_tokens(value) else [value]


def _is_list_of_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_whole(token, 0, GREATEST_NUMBER) for token in value)


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


TEXT_PARTS = "text", "input_text", "output_text"


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _has_name(function):
        return False
    arguments = function.get("arguments")
    return isinstance(arguments, dict) or _json_object(arguments) is None


def _input(value: Any) -> str | None:
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value:
        return "must be a text, or a list of items that is not empty"
    for item in value:
        reason = _item(item) if isinstance(item, dict) else "an item is no object"
        if reason is not None:
            return f"is not supported: {reason}"
    return None


def _item(item: dict[str, Any]) -> str | None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message" or kind in TEXT_PARTS:
        reason = _messages([item if kind == "message" else {"role": "user", "content": [item]}])
        return None if reason is None else f"an item {reason}"
    if kind == "reasoning":
        parts = item.get("content") or []
        good = isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
        return None if good else "a reasoning item has content without a text"
    if kind == "function_call":
        good = isinstance(item.get("call_id"), str) and _is_call({"function": item})
        return None if good else "a function_call needs call_id, name and arguments"
    if kind == "function_call_output":
        good = isinstance(item.get("call_id"), str) and isinstance(item.get("output"), str)
        return None if good else "a function_call_output needs call_id and output, both texts"
    return f"an item has the type {_shown(kind)}"


def _tools(value: Any) -> str | None:
    if not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return "must be a list of objects"
    named = all(tool.get("type") == "function" and _has_name(tool.get("function", tool)) for tool in value)
    return None if named else "must be a list of functions with a name"


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


_TOKEN_NUMBER = re.compile("[0-9]{1,10}")


def _is_bias(value: Any) -> bool:
    numbered = isinstance(value, dict) and all(map(_TOKEN_NUMBER.fullmatch, value))
    return numbered and all(_is_number(bias, -100, 100) for bias in value.values())


_bias = _must_be("an object from token numbers to numbers from -100 to 100", _is_bias)


def _json_object(value: Any) -> str | None:
    parsed = parse_object(value) if isinstance(value, str) else None
    _check_inside("a text that holds JSON", parsed)
    return None if isinstance(parsed, dict) else "must be a text that holds a JSON object"


_stream_options = _must_be(
    "an object of options that are true or false",
    lambda value: isinstance(value, dict) and all(isinstance(option, bool | None) for option in value.values()),
)


def _generation_config(value: Any) -> str | None:
    if not isinstance(value, dict) and (reason := _json_object(value)) is not None:
        return reason
    for name, setting in generation_settings(value).items():
        if name not in SETTINGS:
            return f"has {name}, which is not supported; supported are {', '.join(SETTINGS)}"
        if (reason := SETTINGS[name](setting)) is not None:
            return f"has {name} = {_shown(setting)}, which {reason}"
    return None


def generation_settings(value: Any) -> dict[str, Any]:
    """Return the settings of the field generation_config, which is an object or a text that holds one.

    The library refuses whole numbers for some of them.
    """
    settings: dict[str, Any] = json.loads(value) if isinstance(value, str) else value
    given = {name: setting for name, setting in settings.items() if setting is not None}
    whole_reals = [name for name in _REAL_SETTINGS.keys() & given.keys() if type(given[name]) is int]
    return {**given, **{name: float(given[name]) for name in whole_reals if abs(given[name]) <= GREATEST_NUMBER}}


def _only(*values: Any) -> Check:
    def check(value: Any) -> str | None:
        """Say what is wrong with a value; None if nothing is."""
        known = any(value == other and type(value) is type(other) for other in values)
        return None if known else f"is not supported; leave it out, or write {json.dumps(values[0])}"

    return check


# What changes no answer here, and is ignored.
HARMLESS = (
    "user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip

# What the field generation_config may set: settings of the Transformers library for one answer of one prompt.
_REAL_SETTINGS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0.01, 1),
    "epsilon_cutoff": (0, 0.99),
    "eta_cutoff": (0, 0.99),
    "repetition_penalty": (0.01, 100),
    "length_penalty": (-100, 100),
    "guidance_scale": (1, 100),
}
SETTINGS: dict[str, Check] = {
    **{name: _number(*limits) for name, limits in _REAL_SETTINGS.items()},
    "max_new_tokens": _whole(1, GREATEST_NUMBER),
    "min_new_tokens": _whole(0, GREATEST_NUMBER),
    "top_k": _whole(0, GREATEST_NUMBER),
    "no_repeat_ngram_size": _whole(0, GREATEST_NUMBER),
    "num_beams": _whole(1, 16),
    "prompt_lookup_num_tokens": _whole(1, 64),
    "do_sample": _flag,
    "early_stopping": _flag,
}

_EVERYWHERE: dict[str, Check] = {
    "model": _text,
    "stream": _flag,
    "stream_options": _stream_options,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "seed": _whole(-(2**63), 2**63 - 1),
    "generation_config": _generation_config,
    "cache_prompt": _flag,
}
_SCORES: dict[str, Check] = {
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "logit_bias": _bias,
    "stop": _stops,
    "n": _only(1),
}
_CHATS: dict[str, Check] = {
    "tools": _tools,
    "tool_choice": _only("auto", "none"),
    "parallel_tool_calls": _only(True),
    "chat_template_kwargs": _object,
    "top_logprobs": _only(0),
}
# The fields of each route, beside the harmless ones; every other field is refused. What is in the tables with `_only`
# asks for another answer wherever it has another value.
COMPLETION: dict[str, Check] = {
    **_EVERYWHERE, **_SCORES,
    "prompt": _prompt,
    "max_tokens": _whole(1, GREATEST_NUMBER),
    "suffix": _only(""),
    "best_of": _only(1),
    "echo": _only(False),
    "logprobs": _only(False),
}  # fmt: skip
CHAT: dict[str, Check] = {
    **_EVERYWHERE, **_SCORES, **_CHATS,
    "messages": _messages,
    "max_tokens": _whole(1, GREATEST_NUMBER),
    "max_completion_tokens": _whole(1, GREATEST_NUMBER),
    "logprobs": _only(False),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
}  # fmt: skip
RESPONSE: dict[str, Check] = {
    **_EVERYWHERE, **_CHATS,
    "input": _input,
    "instructions": _text,
    "max_output_tokens": _whole(1, GREATEST_NUMBER),
    "text": _only({"format": {"type": "text"}}, {}),
    "truncation": _only("disabled"),
    "background": _only(False),
    "include": _only([]),
}  # fmt: skip
