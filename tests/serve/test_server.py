"""The endpoint over HTTP, on a free port: the official client, streams, mistakes, many clients, clients that leave."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skimkv import serve
from skimkv.serve.generation import Open, Prompt
from support import tiny_models
from support.serving import Running, running

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

NAME, METHOD = "tiny", "SparQ(r=4, k=16)"
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ m.content }} {% endfor %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    kind, options = tiny_models.FAMILIES["llama"]
    model, tokenizer = tiny_models.build(kind, **options), tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE  # type: ignore[attr-defined]
    with running(model, tokenizer, NAME, METHOD) as started:
        yield started


def words(n: int, seed: int = 0) -> str:
    return " ".join(f"w{i}" for i in tiny_models.prompt(n=n, seed=seed)[0].tolist())


def test_the_official_client(server: Running) -> None:
    client, before = server.client, vars(server.generator.totals).copy()
    prompt = words(50)
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=8)
    assert answer.choices[0].text == server.text(prompt, 8)
    assert (answer.choices[0].finish_reason, answer.usage.prompt_tokens) == ("length", 50)

    messages = [{"role": "user", "content": words(60, seed=1)}]
    pieces = list(client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == server.text(messages[0]["content"], 8)
    assert len(pieces) > 8 and pieces[-1].choices[0].finish_reason == "length"

    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": words(9, seed=2)}]
    second = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8)
    assert second.choices[0].message.content == server.text(" ".join(m["content"] for m in messages), 8)
    after = vars(server.generator.totals)
    assert after["reused_tokens"] - before["reused_tokens"] == 60
    assert after["requests"] - before["requests"] == 3
    status, totals = server.request("/skimkv")
    assert status == 200 and totals["method"] == METHOD and totals["requests"] == after["requests"]
    assert totals["conversations"] == 2 and totals["conversation_bytes"] > 0


def test_a_list_of_prompts_is_answered_together(server: Running) -> None:
    """Choices stand in the order of the prompts, and the pieces of a stream mix."""
    prompts = [words(20 + i, seed=20 + i) for i in range(4)]
    body = {"prompt": prompts, "max_tokens": 8}
    with running(server.generator.model, server.tokenizer, NAME, METHOD, parallel=3) as several:
        status, whole = several.request("/v1/completions", body)
        events = several.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert several.generator.totals.requests == 8
    texts = [server.text(prompt, 8) for prompt in prompts]
    assert status == 200 and [(one["index"], one["text"]) for one in whole["choices"]] == list(enumerate(texts))
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    pieces = [(choice["index"], choice["text"]) for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(text for i, text in pieces if i == index) for index in range(4)] == texts
    order = [index for index, _ in pieces]
    assert order != sorted(order) and order[-1] == 3
    assert whole["usage"]["total_tokens"] == chunks[-1]["usage"]["total_tokens"] == sum(range(20, 24)) + 4 * 8


def numbers(server: Running) -> dict[str, float]:
    """What /metrics tells."""
    answer = server.send("/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("skimkv_"): float(number) for name, number in lines}


def test_metrics(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first request waits for its second token, the second one waits for its turn."""
    before, begin, started, go_on = numbers(server), server.generator.begin, threading.Event(), threading.Event()

    def begin_and_wait(prompt: Prompt, cancelled: threading.Event, take: Any) -> Open | None:
        def wait(tokens: Any) -> bool:
            started.set()
            assert go_on.wait(60)
            return bool(take(tokens))

        return begin(prompt, cancelled, wait)

    monkeypatch.setattr(server.generator, "begin", begin_and_wait)
    with ThreadPoolExecutor(2) as threads:
        body = {"prompt": words(40, seed=7), "max_tokens": 5}
        asked = [threads.submit(server.request, "/v1/completions", body) for _ in range(2)]
        assert started.wait(60)
        while (during := numbers(server))["requests_waiting"] < 1:
            time.sleep(0.01)
        go_on.set()
        assert [each.result()[0] for each in asked] == [200, 200]
    assert (during["requests_running"], during["requests_parallel"], before["requests_running"]) == (1, 1, 0)
    one_token = 2 * 2 * 2 * 16 * 4  # K and V of 2 layers, 2 heads of 16 float32 numbers
    assert during["running_cache_bytes"] >= 40 * one_token
    after = numbers(server)
    assert after["requests_waiting"] == after["requests_running"] == after["running_cache_bytes"] == 0
    grown = [after[f"{name}_total"] - before[f"{name}_total"] for name in ("requests", "prompt_tokens", "new_tokens")]
    assert grown == [2, 80, 10] and after["reused_tokens_total"] - before["reused_tokens_total"] == 38
    assert after["tokens_per_second"] >= 1 and after["conversations"] >= 1 and after["conversation_cache_bytes"] > 0


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"prompt": words(160)}, "the prompt has 160 tokens; prompt and answer together have at most 160"),
    "too long, streamed": ({"prompt": words(160), "stream": True}, "the prompt has 160 tokens"),
    "empty": ({"prompt": ""}, "the prompt is empty"),
    "no such role": ({"chat": True, "messages": [{"role": "system", "content": "w3"}]}, "no such role"),
    "another template": (
        {"chat": True, "messages": [{"role": "user", "content": "w3"}], "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs must not have chat_template",
    ),
}


def test_mistakes(server: Running) -> None:
    for name, (fields, text) in MISTAKES.items():
        path = "/v1/chat/completions" if fields.get("chat") else "/v1/completions"
        body = {"model": NAME, **{key: value for key, value in fields.items() if key != "chat"}}
        status, answer = server.request(path, body)
        assert status == 400 and text in answer["error"]["message"], (name, answer)
        assert "\n" not in answer["error"]["message"], name
    assert server.request("/v1/completions", {"prompt": words(160)})[1]["error"]["code"] == "context_length_exceeded"


def test_a_model_without_a_chat_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", None)
    status, answer = server.request("/v1/responses", {"input": "w3"})
    assert (status, answer["error"]["message"]) == (400, "this model has no chat template: use /v1/completions")


@pytest.mark.parametrize(("error", "status"), [(ValueError, 400), (RuntimeError, 500)])
def test_an_error_while_an_answer_is_generated(
    server: Running, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int
) -> None:
    def fail(*args: Any) -> Open:
        raise error('the "cache"\nis full')

    monkeypatch.setattr(server.generator, "begin", fail)
    request = {"model": NAME, "prompt": words(40)}
    found, answer = server.request("/v1/completions", request)
    assert found == status and answer["error"]["message"] == 'the "cache" is full'
    with pytest.raises(openai.APIError) as caught:
        list(server.client.completions.create(**request, stream=True))
    assert caught.value.message == 'the "cache" is full'
    events = list(server.client.responses.create(model=NAME, input=words(40), stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].message == events[-1].response.error.message == 'the "cache" is full'


def test_only_this_folder_imports_the_server_of_the_library() -> None:
    package = Path(serve.__file__).parents[1]
    importing = re.compile(r"^ *(?:from|import) (fastapi|starlette|uvicorn|openai|transformers\.cli)\b", re.MULTILINE)
    found = {
        str(path.relative_to(package)): set(importing.findall(path.read_text(encoding="utf-8")))
        for path in package.rglob("*.py")
        if "vllm" not in path.parts
    }
    assert {path: names for path, names in found.items() if names} == {
        "serve/__init__.py": {"starlette"},
        "serve/application.py": {"starlette"},
        "serve/connections.py": {"starlette", "uvicorn"},
        "serve/guard.py": {"starlette"},
        "serve/pieces.py": {"transformers.cli"},
    }


@pytest.mark.slow
def test_twenty_clients_wait_for_their_turns(server: Running) -> None:
    before = server.generator.totals.requests
    prompts = [words(40, seed=10 + i % 7) + " " + words(10, seed=i) for i in range(20)]

    client = server.client

    def ask(i: int) -> str:
        if i % 2:
            return str(client.completions.create(model=NAME, prompt=prompts[i], max_tokens=10).choices[0].text)
        stream = client.completions.create(model=NAME, prompt=prompts[i], max_tokens=10, stream=True)
        return "".join(piece.choices[0].text for piece in stream)

    with ThreadPoolExecutor(20) as threads:
        texts = list(threads.map(ask, range(20)))
    assert texts == [server.text(prompt, 10) for prompt in prompts]
    assert server.generator.totals.requests - before == 20


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The client leaves while its answer is generated: generation waits until the server has noticed that."""
    started, totals = threading.Event(), server.generator.totals
    begin, before = server.generator.begin, vars(totals).copy()

    def wait_for_the_end(prompt: Prompt, cancelled: threading.Event, take: Any) -> Open | None:
        def wait(tokens: Any) -> bool:
            """The second token comes only when the client has gone."""
            started.set()
            assert cancelled.wait(60)
            return bool(take(tokens))

        return begin(prompt, cancelled, wait)

    monkeypatch.setattr(server.generator, "begin", wait_for_the_end)
    body = json.dumps({"model": NAME, "prompt": words(40), "max_tokens": 100, "stream": stream}).encode()
    with socket.create_connection((server.host, server.port)) as connection:
        lines = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        connection.sendall(head.encode() + body)
        assert started.wait(60)
    monkeypatch.undo()
    server.client.completions.create(model=NAME, prompt=words(40), max_tokens=5)  # after the other one's turn
    assert totals.requests - before["requests"] == 2
    assert totals.new_tokens - before["new_tokens"] in (1 + 5, 2 + 5)


def test_versions_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"5.23.0": True, "5.20.0": True, "5.19.4": False, "5.24.0.dev0": False, "6.0": False}
    for version, known in versions.items():
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        if known:
            assert serve.check_installed() is None  # type: ignore[func-returns-value]
        else:
            with pytest.raises(ValueError, match=rf"tested with transformers 5.20 up to 5.24, and this is {version}"):
                serve.check_installed()


def test_a_library_that_moved(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    for name in ("skimkv.serve.application", "skimkv.serve.pieces", "skimkv.serve.worker"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"tested with transformers 5.20 up to 5.24, and this is .*import of"):
        serve.build_application(server.generator, server.tokenizer, NAME)


def test_an_address_is_reserved_before_it_answers() -> None:
    """A client that connects before the server listens is refused, and does not wait."""
    with serve.reserve("127.0.0.1", 0) as reserved:
        address = reserved.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        with serve.reserve(*address) as second:  # which the system lets two have that do not listen
            assert serve.listen(*address, reserved) is reserved
            socket.create_connection(address, timeout=30).close()
            with pytest.raises(ValueError, match=r"cannot listen at 127\.0\.0\.1, port"):
                serve.listen(*address, second)
            assert second.fileno() == -1
    for host, reason in (("", "--host is empty; give an address"), ("256.0.0.1", "cannot listen at 256.0.0.1")):
        with pytest.raises(ValueError, match=reason):
            serve.reserve(host, 0)


def test_a_port_that_is_taken() -> None:
    with (
        serve.listen("127.0.0.1", 0) as opened,
        pytest.raises(ValueError, match=r"cannot listen at 127\.0\.0\.1, port"),
    ):
        serve.listen("127.0.0.1", opened.getsockname()[1])
