"""The tokens of a chat: messages, and the items of a response's input, through the model's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from .requests import TEXT_PARTS, Refused

Message = dict[str, Any]
# Beside the arguments of apply_chat_template: names under which the library gives something to the template.
TAKEN = {"messages", "conversations", "self"}


def chat_tokens(tokenizer: Any, messages: list[Message], body: Mapping[str, Any], field: str) -> list[int]:
    """Return the tokens of a prompt for the next message, with the tools of a request.

    field: the one of the request that the messages come from.

    Raises Refused if the model has no chat template, if the template does not take these messages or the request's
    chat_template_kwargs, or if it says nothing of the tools.
    """
    if not tokenizer.chat_template:
        raise Refused("this model has no chat template: use /v1/completions")
    options = body.get("chat_template_kwargs", {})
    own = (inspect.signature(tokenizer.apply_chat_template).parameters.keys() | TAKEN) - {"documents"}
    if taken := sorted(own & options.keys()):
        raise _refused_options(f"must not have {taken[0]}")
    documents = options.get("documents")
    if not (documents is None or (isinstance(documents, list) and all(isinstance(one, dict) for one in documents))):
        raise _refused_options("has documents that are no list of objects")
    said, tools = [_for_template(message) for message in messages], used_tools(body)

    def render(tools: list[Any] | None, options: dict[str, Any] = options) -> str:
        """Write the conversation by the model's template, with these tools."""
        text: str = tokenizer.apply_chat_template(
            said, tools=tools, add_generation_prompt=True, tokenize=False, **options
        )
        return text

    try:
        text = render(tools)
        is_told_of_tools = tools is None or text != render(None)
    except Exception as error:  # a template is a program that comes with the model
        if options and _succeeds(lambda: render(tools, {})):
            raise _refused_options(f"is not what the model's chat template takes: {error}") from None
        raise Refused(f"the model's chat template does not take the {field}: {error}", field) from None
    if not is_told_of_tools:
        raise Refused("tools are not supported by this model, whose chat template does not name them", "tools")
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _refused_options(reason: str) -> Refused:
    return Refused(f"chat_template_kwargs {reason}", "chat_template_kwargs", "invalid_value")


def _succeeds(work: Callable[[], Any]) -> bool:
    try:
        work()
    except Exception:
        return False
    return True


def used_tools(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a request lets the model call, in the form that chat templates know; None if it is none."""
    if body.get("tool_choice") == "none":
        return None
    tools = [
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in body.get("tools", [])
    ]
    return tools or None


def _for_template(message: Message) -> Message:
    """A message with its content as one text, and the arguments of its calls as objects: what templates expect."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    message = {**message, "content": content}
    if message.get("tool_calls"):
        message["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in message["tool_calls"]]
    return message


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def response_messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages that the input and the instructions of a response stand for. Raises Refused if it is none."""
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[Message] = []
    reasoning = ""

    def begin(role: str, content: Any) -> Message:
        """Begin a message. What the assistant reasoned before it belongs to it."""
        nonlocal reasoning
        messages.append({"role": role, "content": content})
        if role == "assistant" and reasoning:
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
        return messages[-1]

    for item in items:
        kind = item.get("type", "message")
        last: Message = messages[-1] if messages else {"role": ""}
        if kind == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or [])
        elif kind in TEXT_PARTS:
            message = last if last["role"] == "user" and isinstance(last["content"], list) else begin("user", [])
            message["content"].append(item)
        elif kind == "function_call_output":
            begin("tool", item["output"])["tool_call_id"] = item["call_id"]
        elif kind == "function_call":
            message = last if last["role"] == "assistant" else begin("assistant", "")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            begin(item["role"], item.get("content"))
    if instructions := body.get("instructions"):
        if messages and messages[0]["role"] == "system":
            system = _for_template(messages.pop(0))["content"]
            instructions = f"{instructions}\n\n{system}"
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Refused("input holds reasoning alone: add a message or a function's output", "input", "invalid_value")
    return messages
