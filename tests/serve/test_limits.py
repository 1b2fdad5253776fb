"""What no request may do to a server: fill its memory, keep it busy, hold its connections, or ask it from elsewhere."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skimkv.serve import application, connections
from support import tiny_models
from support.command_line import SKIMKV
from support.serving import Running, running

pytest.importorskip("uvicorn")

ORIGIN = "http://localhost:3000"


def tiny() -> tuple[Any, Any]:
    kind, options = tiny_models.FAMILIES["llama"]
    return tiny_models.build(kind, **options), tiny_models.tokenizer()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(*tiny(), "tiny", "Dense()") as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """A server that pages of one origin may ask, with little room for bodies."""
    with running(*tiny(), "tiny", "Dense()", cors=[ORIGIN], max_body=2000) as started:
        yield started


def message_of(answer: Any) -> str:
    return str(json.loads(answer.read())["error"]["message"])


def test_a_large_body_is_refused_before_it_is_tokenised(server: Running, shared: Running) -> None:
    """The default follows from the longest prompt, 160 tokens here, and is at least a megabyte."""
    for path, name in (("/v1/completions", "prompt"), ("/v1/responses", "input"), ("/v1/chat/completions", "user")):
        answer = server.send(path, {name: "w3 " * 400_000})
        assert answer.status == 413
        assert "at most 1048576 are read" in message_of(answer)
    assert shared.send("/v1/completions", {"prompt": "w3 " * 700}).status == 413
    assert shared.send("/v1/completions", {"prompt": "w3", "user": "u" * 1500, "max_tokens": 1}).status == 200
    pieces = iter([b'{"prompt": "', *[b"w3 " * 100] * 20, b'"}'])  # its length is not said
    connection = _connect(shared)
    connection.request("POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=False)
    assert connection.getresponse().status == 413
    large = running(*tiny(), "tiny", "Dense()", max_body=10**7)
    with large as started:
        assert started.send("/v1/completions", {"prompt": "w3 " * 400_000}).status == 400  # too many tokens


def test_a_body_without_end_is_refused_before_it_has_come(shared: Running) -> None:
    """By the length that it says it has, and by what comes of one that does not say it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    piece = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    for rest, pieces in ((b"Content-Length: 99999999999\r\n\r\n", 0), (b"Transfer-Encoding: chunked\r\n\r\n", 2)):
        with socket.create_connection((shared.host, shared.port)) as connection:
            connection.settimeout(30)
            connection.sendall(head + rest + piece * pieces)
            assert b"413" in connection.recv(4000).splitlines()[0]


def _connect(server: Running) -> Any:
    import http.client

    return http.client.HTTPConnection(server.host, server.port, timeout=60)


def test_the_server_answers_while_a_text_is_tokenised(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        """Stands for a tokenizer that takes its time."""

        chat_template = "{{ messages[0].content }}"

        def __call__(self, text: str, **options: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return tiny_models.tokenizer()(text)  # type: ignore[operator]

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return str(self("w3") and "w3")

        def decode(self, tokens: Any, **options: Any) -> str:
            return ""

    answers: list[int] = []
    with running(tiny()[0], Slow(), "tiny", "Dense()") as slow:
        for path, fields in (("/v1/completions", {"prompt": "w3"}), ("/v1/responses", {"input": "w3"})):
            begun.clear()
            go_on.clear()
            body = {**fields, "max_tokens" if "prompt" in fields else "max_output_tokens": 1}
            asking = threading.Thread(target=lambda *to: answers.append(slow.request(*to)[0]), args=(path, body))
            asking.start()
            assert begun.wait(60)
            assert slow.request("/health") == (200, {"status": "ok"})
            go_on.set()
            asking.join(60)
            assert answers.pop() == 200


def test_slow_clients(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(application, "BODY_SECONDS", 0.5)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n"
    for sent in (b"", b"GET /hea", head):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.settimeout(30)
            connection.sendall(sent)
            assert connection.recv(100) == b"", sent  # the server has closed it
    with socket.create_connection((server.host, server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(1000)
        assert b"200 OK" in received
        connection.sendall(b"GET /health HTT")  # the second request over the same connection
        assert connection.recv(100) == b""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(head + b'\r\n{"prompt": ')
        assert b"408" in connection.recv(4000).splitlines()[0]
    assert server.request("/v1/completions", {"prompt": "w3", "max_tokens": 2})[0] == 200


def test_no_other_origin_unless_it_is_named(server: Running, shared: Running) -> None:
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}

    def allowed(asked: Running, path: str, origin: str, method: str = "", body: Any = None) -> str | None:
        answer = asked.send(path, body, {**ask, "Origin": origin}, method)
        return answer.headers["Access-Control-Allow-Origin"]

    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
        assert allowed(server, path, ORIGIN, "OPTIONS") is None
        assert allowed(shared, path, ORIGIN, "OPTIONS") == ORIGIN
        assert allowed(shared, path, "http://elsewhere.example", "OPTIONS") is None
    body = {"prompt": "w3", "max_tokens": 1}
    assert allowed(server, "/v1/completions", ORIGIN, body=body) is None
    assert allowed(shared, "/v1/completions", ORIGIN, body=body) == ORIGIN
    assert allowed(shared, "/v1/completions", ORIGIN, body={**body, "colour": 1}) == ORIGIN  # an error, too
    assert allowed(shared, "/v1/models", "http://elsewhere.example") is None
    # what a page of any origin can send without being asked is refused
    plain = server.send("/v1/completions", b'{"prompt": "w3"}', {"Content-Type": "text/plain"})
    assert plain.status == 415 and "application/json" in message_of(plain)


def test_a_key_that_requests_must_have() -> None:
    key = {"Authorization": "Bearer one-two-three"}
    with running(*tiny(), "tiny", "Dense()", cors=[ORIGIN], api_key="one-two-three") as guarded:
        body = {"prompt": "w3", "max_tokens": 1}
        for path, sent in (("/v1/completions", body), ("/v1/models", None), ("/metrics", None), ("/skimkv", None)):
            for wrong in ({}, {"Authorization": "Bearer one-two-thre"}, {"Authorization": "Basic one-two-three"}):
                refused = guarded.send(path, sent, wrong)
                assert refused.status == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
                assert "Bearer KEY" in message_of(refused)
            assert guarded.send(path, sent, key).status == 200
        assert guarded.send("/health").status == 200
        ask = {
            "Origin": ORIGIN,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        asked = guarded.send("/v1/completions", None, ask, "OPTIONS")  # a browser asks so, without the key
        assert asked.status == 200 and asked.headers["Access-Control-Allow-Origin"] == ORIGIN


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_while_it_is_busy(sent: signal.Signals) -> None:
    """A long answer is generated, and a text is tokenised that would take minutes: the process ends all the same."""
    argv = [*SKIMKV, "serve", "builtin", "--port", "0", "--max-body", "100M"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may have it ignored
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
    busy = []
    for prompt in ("red-fox: 31425\n", "word 123 " * 700_000):
        body = json.dumps({"prompt": prompt, "max_tokens": 8000, "stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", port))
        length = f"Content-Length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}"
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        busy.append(connection)
    busy[0].settimeout(60)
    assert busy[0].recv(100)
    time.sleep(0.5)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent) and "Traceback" not in errors
