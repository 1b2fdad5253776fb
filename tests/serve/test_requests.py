"""The fields of a request: what may stand there, and the line that is returned where it may not."""

from __future__ import annotations

from typing import Any

import pytest

from skimkv.serve.requests import check_request, require

GOOD: dict[str, list[Any]] = {
    "prompt": ["", "text"],
    "messages": [
        [{"role": "user", "content": "text"}],
        [{"role": "user", "content": [{"type": "text", "text": "a part"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ],
    "stream": [True, False, None],
    "stop": ["a", ["a", "b"]],
    "max_tokens": [1, None],
    "temperature": [0, 0.5, 2],
    "seed": [-1, 2**63 - 1],
    "logit_bias": [{"50256": -100}, {}],
    "generation_config": ['{"num_beams": 2}'],
    "tools": [[{"type": "function"}], []],
    "n": [1],
    "logprobs": [False, None],
    "response_format": [{"type": "text"}],
    "user": ["anybody"],
}
BAD: dict[str, list[Any]] = {
    "model": [1],
    "prompt": [["a", "b"], 3],
    "messages": [
        [],
        "text",
        ["text"],
        [{"content": "no role"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": {}}],
    ],
    "stream": ["yes", 1],
    "stop": ["", [], ["a", ""], 3],
    "max_tokens": [0, -1, 1.5, True, "5", 2**40],
    "temperature": [-1, 3, "hot", float("nan"), True],
    "top_p": [2],
    "seed": [2**63, 0.5],
    "logit_bias": [{"a": 1}, {"1": 300}, []],
    "generation_config": ["{", "[]", {}],
    "tools": [{}, ["f"]],
    "n": [2, True],
    "logprobs": [True, 3],
    "response_format": [{"type": "json_object"}],
    "tool_choice": ["required"],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_values(name: str) -> None:
    assert [check_request({name: value}) for value in GOOD[name]] == [None] * len(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^{name} = ") as caught:
            check_request({name: value})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ValueError, match=r"^stop = \[\"aaa.*\.\.\. must be"):
        check_request({"stop": ["a" * 500, ""]})


def test_a_field_that_is_needed() -> None:
    with pytest.raises(ValueError, match="the request has no messages"):
        require({"prompt": "x", "messages": None}, "messages")
    assert require({"messages": []}, "messages") is None  # type: ignore[func-returns-value]
