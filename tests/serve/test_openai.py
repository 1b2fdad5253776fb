"""What OpenAI documents of its endpoints, asked of ours with the bundled model: by formula, by field, by error.

The requests that vLLM's server answers as well stand in `support.openai_requests`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import skimkv
from support.openai_requests import ANSWER, CASES, NAME, PROMPT, TEMPLATE, Case, Formula, check, describe
from support.serving import Running, running

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

ROUTES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 6},
}
WITH_SCORES = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)  # the model is too small to gain from more
    model, tokenizer = skimkv.load("builtin")
    tokenizer.chat_template = TEMPLATE
    with running(model, tokenizer, NAME, "Dense()") as started:
        yield started


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any route."""
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def ask(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    """The whole answer of a route to PROMPT."""
    status, answer = server.request(path, {"model": NAME, **ROUTES[path], **fields})
    assert status == 200, answer
    return dict(answer)


def tokens_of(server: Running, text: str, chat: bool = False) -> list[int]:
    """The tokens of a prompt; the chat template adds nothing, so a chat has no token for the beginning."""
    return list(server.tokenizer(text, add_special_tokens=not chat).input_ids)


@pytest.fixture(scope="module")
def formula(server: Running) -> Formula:
    return Formula(server.generator.model, server.tokenizer)


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_what_clients_send(server: Running, formula: Formula, case: Case) -> None:
    check(server, formula, case)


# ---- penalties and biases


def test_penalties_count_in_every_way_to_generate(server: Running) -> None:
    """Beams, drafts from the prompt and samples of one token go through the same formula."""
    plain = ask(server, "/v1/completions", frequency_penalty=1.5)
    for settings in ({"num_beams": 1}, {"prompt_lookup_num_tokens": 2}, {"do_sample": True, "top_k": 1}):
        other = ask(server, "/v1/completions", frequency_penalty=1.5, generation_config=json.dumps(settings))
        assert text_of(other) == text_of(plain), settings


def test_sampling_is_from_all_tokens(server: Running) -> None:
    """At temperature 2 a token outside the 50 most probable ones comes with a known probability: not never."""
    ids = tokens_of(server, "stone")
    with torch.no_grad():
        logits = server.generator.model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    probable = torch.softmax(logits / 2, 0)
    best = probable.topk(50).indices.tolist()
    outside = 1 - float(probable[best].sum())
    assert outside > 0.1
    times = 60
    prompts = [ids] * times
    answer = ask(server, "/v1/completions", prompt=prompts, max_tokens=1, temperature=2)
    known = {server.tokenizer.decode([token], skip_special_tokens=True) for token in best}
    others = sum(choice["text"] not in known for choice in answer["choices"])
    assert others > 0  # by chance none in (1 - outside) ** 60 < 0.2 % of all runs


# ---- fields that are refused, and fields that are harmless

UNUSED: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "suffix": "z", "n": 2, "best_of": 3, "echo": True, "logprobs": 1, "top_k": 3, "colour": 1,
        "functions": [], "reasoning_effort": "low", "response_format": {"type": "json_object"}, "messages": [],
    },
    "/v1/chat/completions": {
        "n": 2, "logprobs": True, "top_logprobs": 3, "functions": [{"name": "f"}], "function_call": "auto",
        "reasoning_effort": "low", "modalities": ["audio"], "audio": {"voice": "a", "format": "wav"},
        "prediction": {"type": "content", "content": "x"}, "response_format": {"type": "json_object"},
        "tool_choice": "required", "parallel_tool_calls": False, "web_search_options": {}, "verbosity": "low",
        "suffix": "z", "echo": True, "previous_response_id": "resp_1", "top_k": 3, "colour": 1,
    },
    "/v1/responses": {
        "previous_response_id": "resp_1", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"},
        "conversation": "conv_1", "background": True, "include": ["message.output_text.logprobs"], "max_tool_calls": 1,
        "prompt": {"id": "p"}, "truncation": "auto", "top_logprobs": 2, "tool_choice": "required", "stop": "x",
        "frequency_penalty": 1, "logit_bias": {}, "max_tokens": 4, "modalities": ["text"], "colour": 1,
        "parallel_tool_calls": False, "tools": [{"type": "web_search"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", UNUSED)
def test_what_is_not_used_is_refused_by_name(server: Running, path: str) -> None:
    for name, value in UNUSED[path].items():
        status, answer = server.request(path, {"model": NAME, **ROUTES[path], name: value})
        assert status == 400, (name, answer)
        error = answer["error"]
        assert error["param"] == name and error["message"].startswith(f"{name} "), answer
        assert error["code"] in ("unsupported_parameter", "invalid_value")
        assert "\n" not in error["message"]


HARMLESS = {
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "stream_options": {"include_usage": True},
}
AS_IF_LEFT_OUT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"n": 1, "best_of": 1, "echo": False, "suffix": "", "stop": [], "logit_bias": {}},
    "/v1/chat/completions": {
        "n": 1, "logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "stop": [],
        "parallel_tool_calls": True, "modalities": ["text"], "frequency_penalty": 0,
    },
    "/v1/responses": {
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False, "include": [],
        "tool_choice": "none", "tools": [], "parallel_tool_calls": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_what_changes_nothing_is_accepted(server: Running, path: str) -> None:
    plain = text_of(ask(server, path))
    assert text_of(ask(server, path, **HARMLESS)) == plain
    assert text_of(ask(server, path, **AS_IF_LEFT_OUT[path])) == plain
    assert text_of(ask(server, path, **dict.fromkeys([*UNUSED[path], *HARMLESS, "stop", "seed", "stream"]))) == plain


@pytest.mark.parametrize("path", ROUTES)
def test_a_prompt_is_read_anew_where_a_request_says_so(server: Running, path: str) -> None:
    """The prompt is long enough to be kept."""
    name = next(field for field in ("prompt", "messages", "input") if field in ROUTES[path])
    text = f"{path}: " + "stone-7: 10259\n" * 12
    fields = {name: [{"role": "user", "content": text}] if name == "messages" else text}

    def asked(**more: Any) -> tuple[str, int]:
        answer = ask(server, path, **fields, **more)
        usage = answer["usage"]
        details = usage["prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"]
        return text_of(answer), details["cached_tokens"]

    first, none = asked()
    assert none == 0 and asked(cache_prompt=False) == asked(cache_prompt=False) == (first, 0)
    assert asked(cache_prompt=True)[1] == asked()[1] >= 32  # what was read anew is kept
    status, answer = server.request(path, {**ROUTES[path], "cache_prompt": "no"})
    assert (status, answer["error"]["param"]) == (400, "cache_prompt")


# ---- valid requests


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == [NAME]
    model = server.client.models.retrieve(NAME)
    assert (model.id, model.object) == (NAME, "model")
    with pytest.raises(openai.NotFoundError, match="gpt-4") as caught:
        server.client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_response_is_one_object_unless_it_is_streamed(server: Running) -> None:
    answer = server.client.responses.create(model=NAME, input=PROMPT, max_output_tokens=6)
    text = server.text(PROMPT, 6)
    assert answer.object == "response" and answer.output_text == text_of(ask(server, "/v1/responses"))
    assert answer.output_text.startswith(ANSWER) and text.startswith(ANSWER)
    events = list(server.client.responses.create(model=NAME, input=PROMPT, max_output_tokens=6, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == answer.output_text
    assert events[-1].response.output_text == answer.output_text


def test_messages_and_items(server: Running) -> None:
    """Every form of the same words gives the same prompt."""
    head, tail = PROMPT[:15], PROMPT[15:]
    plain = text_of(ask(server, "/v1/chat/completions"))
    for messages in (
        [{"role": "system", "content": head}, {"role": "user", "content": tail}],
        [{"role": "user", "content": [{"type": "text", "text": PROMPT}], "name": "somebody"}],
        [{"role": "user", "content": head}, {"role": "assistant", "content": None}, {"role": "user", "content": tail}],
    ):
        assert text_of(ask(server, "/v1/chat/completions", messages=messages)) == plain
    for items in (
        [{"role": "user", "content": PROMPT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        [{"type": "input_text", "text": PROMPT}],
        [{"role": "system", "content": head}, {"role": "user", "content": tail}],
        [{"type": "function_call_output", "call_id": "c", "output": PROMPT}],
    ):
        assert text_of(ask(server, "/v1/responses", input=items)) == plain
    assert text_of(ask(server, "/v1/responses", instructions=head, input=tail)) == plain
    both = [{"role": "system", "content": tail[:5]}, {"role": "user", "content": tail[5:]}]
    with_break = text_of(
        ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": head + "\n\n" + tail}])
    )
    assert text_of(ask(server, "/v1/responses", instructions=head, input=both)) == with_break
    status, answer = server.request("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]})
    assert status == 400 and "item_reference" in answer["error"]["message"]


# ---- how an answer ends


def test_a_response_that_is_cut_is_incomplete(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = server.client.responses.create(model=NAME, input=PROMPT, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.usage.output_tokens == 2
    line_end = server.tokenizer("\n", add_special_tokens=False).input_ids[0]
    monkeypatch.setattr(server.generator.model.generation_config, "eos_token_id", [line_end])
    ended = server.client.responses.create(model=NAME, input=PROMPT, max_output_tokens=20)
    assert (ended.status, ended.incomplete_details) == ("completed", None), ended.usage
    assert ended.output[0].status == "completed" and ended.output_text.strip() == ANSWER


@pytest.mark.parametrize("path", WITH_SCORES)
def test_a_stream_counts_tokens_where_it_is_asked_to(server: Running, path: str) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = server.events(path, {**ROUTES[path], **options})
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        counts = [chunk["usage"] for chunk in chunks if "usage" in chunk]
        expected = [*[None] * (len(chunks) - 1), 6] if options else []
        assert [count and count["completion_tokens"] for count in counts] == expected


def test_answers_have_the_types_that_the_official_client_documents(server: Running) -> None:
    """Every answer and event is checked strictly; the client itself takes whatever comes."""
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    chat, event = "/v1/chat/completions", TypeAdapter(ResponseStreamEvent)
    Completion.model_validate(ask(server, "/v1/completions"), strict=True)
    ChatCompletion.model_validate(ask(server, chat), strict=True)
    Response.model_validate_json(json.dumps(ask(server, "/v1/responses")), strict=True)
    Model.model_validate(server.request(f"/v1/models/{NAME}")[1], strict=True)
    counted = {"stream_options": {"include_usage": True}}
    chunks = [
        ChatCompletionChunk.model_validate_json(e[6:], strict=True) for e in server.events(chat, ROUTES[chat])[:-1]
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in server.events(chat, {**ROUTES[chat], **counted})[:-1]:
        ChatCompletionChunk.model_validate_json(chunk[6:], strict=True)
    written = [text.split("\n", 1) for text in server.events("/v1/responses", ROUTES["/v1/responses"])]
    events = [event.validate_json(data.removeprefix("data: "), strict=True) for _, data in written]
    assert [name for name, _ in written] == [f"event: {one.type}" for one in events]
    options = {"messages": ROUTES[chat]["messages"], "max_tokens": 20, "stop": "\n"}
    with server.client.chat.completions.stream(model=NAME, **options) as stream:
        assert stream.get_final_completion().choices[0].message.content == text_of(ask(server, chat, **options))


# ---- errors


@pytest.mark.parametrize("path", ROUTES)
def test_errors_are_objects_that_the_client_understands(server: Running, path: str) -> None:
    body = ROUTES[path]
    bad: list[tuple[int, Any]] = [
        (400, {**body, "temperature": "hot"}), (404, {**body, "model": "gpt-4"}), (400, {**body, "stream": "yes"}),
        (400, {**body, "generation_config": '{"eos_token_id": {}}'}), (400, {}), (400, b"{nonsense"), (400, b"[1]"),
        (400, b""), (400, b"\xff\xfe"), (400, b'{"temperature": NaN}'), (400, b'{"max_tokens": ' + b"9" * 5000 + b"}"),
    ]  # fmt: skip
    for status, fields in bad:
        found, answer = server.request(path, fields)
        assert found == status, (fields, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}, fields
        assert answer["error"]["type"] == "invalid_request_error" and "\n" not in answer["error"]["message"]
    for method, address, status in (
        ("GET", path, 405), ("POST", "/v1/nonsense", 404), ("POST", "/v1/audio/transcriptions", 404),
        ("POST", "/v1/models", 405), ("GET", "/", 404),
    ):  # fmt: skip
        raw = server.send(address, b"{}" if method == "POST" else None, method=method)
        assert raw.status == status, address
        assert set(json.loads(raw.read())["error"]) == {"message", "type", "param", "code"}


def test_errors_name_the_field_that_is_wrong(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: dict[str, list[Any]] = {
        "messages": [[]], "self": [1], "conversation": [[]], "conversations": [[[]]], "documents": [[1], 3, "text"],
        "bos_token": [3],
    }  # fmt: skip
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ (bos_token or '') + messages[0].content }}")
    for path in ("/v1/chat/completions", "/v1/responses"):
        for name, values in bad.items():
            for value in values:
                fields = {**ROUTES[path], "chat_template_kwargs": {name: value}}
                status, answer = server.request(path, fields)
                assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs"), (name, answer)
                assert answer["error"]["message"].startswith("chat_template_kwargs "), answer
        documents = {"chat_template_kwargs": {"documents": [{"title": "a", "text": "b"}]}}
        assert server.request(path, {**ROUTES[path], **documents})[0] == 200


def test_a_response_names_its_own_fields(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ raise_exception('no') }}")
    for items, words in (
        ([{"type": "reasoning", "summary": []}], "input holds reasoning alone"),
        ([{"role": "user", "content": "a"}], "the model's chat template does not take the input: no"),
    ):
        status, answer = server.request("/v1/responses", {"input": items})
        assert (status, answer["error"]["param"]) == (400, "input") and words in answer["error"]["message"], answer


# ---- what a server must survive


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_tools_that_a_chat_template_does_not_name_are_refused(server: Running, path: str) -> None:
    """The model would never know of them. With tool_choice "none" it need not."""
    functions = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "name": "add"}]
    body = {"model": NAME, **ROUTES[path]}
    for tool in functions:
        status, answer = server.request(path, {**body, "tools": [tool]})
        assert status == 400 and answer["error"]["param"] == "tools"
        assert answer["error"]["message"].startswith("tools are not supported by this model")
        assert server.request(path, {**body, "tools": [tool], "tool_choice": "none"})[0] == 200


@pytest.mark.parametrize("path", ROUTES)
def test_half_of_a_surrogate_pair(server: Running, path: str) -> None:
    half, body = "\ud800 abc", ROUTES[path]
    inside = json.dumps({"a": half})
    places: list[dict[str, Any]] = [
        {"prompt": half}, {"prompt": [half]}, {"messages": [{"role": "user", "content": half}]}, {"input": half},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": half}]}]}, {"stop": half}, {"stop": [half]},
        {"input": [{"role": "user", "content": half}]}, {"user": half}, {half: 1}, {"metadata": {half: "x"}},
        {"model": half}, {"tools": [{"type": "function", "name": half}]}, {"instructions": half},
        {"logit_bias": {half: 1}}, {"chat_template_kwargs": {"a": half}}, {"generation_config": {half: 1}},
        {"generation_config": json.dumps({half: 1})},
    ]  # fmt: skip
    calls: dict[str, dict[str, Any]] = {
        "/v1/completions": {},
        "/v1/chat/completions": {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": inside}}]}]
        },
        "/v1/responses": {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": inside}]},
    }
    for fields in places + [calls[path]] * bool(calls[path]):
        status, answer = server.request(path, {**body, **fields})
        assert status == 400, (fields, answer)
        assert "surrogate" in answer["error"]["message"] and "\n" not in answer["error"]["message"], fields
        assert answer["error"]["param"] in {*fields, "the body"}, (fields, answer)
    raw = json.dumps({**body, "user": "X"}).encode().replace(b'"X"', b'"\xed\xa0\x80"')
    assert server.request(path, raw)[0] == 400
    assert text_of(ask(server, path, user="\U0001f600")) == text_of(ask(server, path))


def test_deep_json(server: Running) -> None:
    for path, body in ROUTES.items():
        for deep in (
            b"[" * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b"[" * 200 + b"]" * 200,
            b'{"a":' * 90 + b"1" + b"}" * 90,
        ):
            raw = json.dumps({**body, "metadata": "X"}).encode().replace(b'"X"', deep)
            status, answer = server.request(path, raw)
            assert status == 400 and "\n" not in answer["error"]["message"], deep[:5]
    config = '{"a": ' + "[" * 100_000 + "}"
    assert server.request("/v1/completions", {"prompt": "a", "generation_config": config})[0] == 400
    arguments = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
    messages = [{"role": "assistant", "tool_calls": arguments}]
    assert server.request("/v1/chat/completions", {"messages": messages})[0] == 400
