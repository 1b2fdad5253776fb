"""The fields of a request: what may stand there, and the line that is returned where it may not."""

from __future__ import annotations

from typing import Any

import pytest

from skimkv.serve.requests import CHAT, COMPLETION, RESPONSE, Refused, check_request, read_object

CALL = {"function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, list[Any]] = {
    "prompt": ["", "text", [1, 2], ["a", "b"], [[1], [2, 3]], ["a", [1]]],
    "messages": [
        [{"role": "user", "content": "text"}],
        [{"role": "user", "content": [{"type": "text", "text": "a part"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
    ],
    "input": [
        "text",
        [
            {"role": "user", "content": "text"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ],
        [{"type": "reasoning", "summary": []}, {"type": "reasoning", "content": [{"text": "so"}]}],
    ],
    "stream": [True, False],
    "stop": ["a", ["a", "b"], []],
    "max_tokens": [1],
    "temperature": [0, 0.5, 2],
    "seed": [-1, 2**63 - 1],
    "logit_bias": [{"50256": -100}, {"50256": 1.5}, {}],
    "generation_config": ['{"num_beams": 2}', {"num_beams": 2}, {"top_k": None}],
    "tools": [[{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}], []],
    "n": [1],
    "logprobs": [False],
    "response_format": [{"type": "text"}],
    "user": ["anybody", 3],
}
BAD: dict[str, list[Any]] = {
    "model": [1],
    "prompt": [[], [[]], [["a"]], 3, {}, [True], [1, "a"], [-1], [1.5], ["a"] * 129],
    "messages": [
        [],
        "text",
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
        [{"role": "assistant", "tool_calls": {}}],
    ],
    "input": [
        [],
        3,
        ["text"],
        [{"type": "item_reference", "id": "x"}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "c"}],
        [{"type": "reasoning", "content": [{}]}],
        [{"type": "input_image", "image_url": "x"}],
        [{"role": "user", "content": 3}],
    ],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": 1}, []],
    "stop": ["", ["a", ""], 3, ["a"] * 17],
    "max_tokens": [0, -1, 1.5, True, "5", 2**40],
    "temperature": [-1, 3, "hot", float("nan"), True, 10**400],
    "top_p": [2],
    "frequency_penalty": [-2.1, 2.1, "1"],
    "presence_penalty": [-2.1, 2.1, True],
    "seed": [2**63, 0.5],
    "logit_bias": [{"a": 1}, {"1": 300}, {"1": True}, {"\u0661": 1}, [], {"1": 10**400}, {"9" * 5000: 1}],
    "generation_config": ["{", "[]", [], {"cache_implementation": "static"}, {"top_k": "x"}, {"top_p": 10**400}],
    "tools": [{}, ["f"], [{"type": "web_search"}], [{"type": "function"}]],
    "n": [2, True],
    "logprobs": [True, 3, 0],
    "response_format": [{"type": "json_object"}],
    "tool_choice": ["required"],
}


def check(name: str, value: Any) -> None:
    for checks in (COMPLETION, CHAT, RESPONSE):
        if name in checks or name == "user":
            check_request({name: value}, checks)


@pytest.mark.parametrize("name", GOOD)
def test_good_values(name: str) -> None:
    assert [check(name, value) for value in GOOD[name]] == [None] * len(GOOD[name])  # type: ignore[func-returns-value]


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(Refused, match=f"^{name} = ") as caught:
            check(name, value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert caught.value.error["error"]["param"] == name


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(Refused, match=r"^stop = \[\"aaa.*\.\.\. must be"):
        check("stop", ["a" * 500, ""])


def test_a_field_that_is_needed() -> None:
    with pytest.raises(Refused, match="the request has no messages"):
        check_request({"model": "x"}, CHAT, "messages")


def test_a_body_without_what_is_null() -> None:
    assert read_object(b'{"a": null, "b": [null], "c": false}') == {"b": [None], "c": False}
    for body, words in (
        (b"", "not JSON"),
        (b"3", "must be a JSON object"),
        (b'{"a": Infinity}', "Infinity is no"),
        (b'{"a": [-1e999]}', "-1e999 is greater than any floating-point number"),
    ):
        with pytest.raises(Refused, match=words):
            read_object(body)
