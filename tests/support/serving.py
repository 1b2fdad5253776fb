"""A server of `skimkv serve` in a thread of the tests' process, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import skimkv
from skimkv import serve
from skimkv.hf.cache import Cache
from skimkv.serve.conversations import Conversations
from skimkv.serve.generation import Generator


class Running(NamedTuple):
    """A server that runs, and what it serves."""

    generator: Generator
    tokenizer: Any
    host: str
    port: int

    @property
    def client(self) -> Any:
        """The official client."""
        import openai

        return openai.OpenAI(base_url=f"http://{self.host}:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def send(self, path: str, body: Any = None, headers: Any = None, method: str = "") -> http.client.HTTPResponse:
        """Send a request, and return its response, unread. body: bytes, or an object that becomes JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if body is None else "POST"),
            path,
            data,
            {"Content-Type": "application/json"} | (headers or {}),
        )
        return connection.getresponse()

    def request(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; without a body a GET."""
        answer = self.send(path, body)
        return answer.status, json.loads(answer.read())

    def events(self, path: str, body: Any) -> list[str]:
        """The events of a stream, as they are written."""
        answer = self.send(path, {**body, "stream": True})
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        return answer.read().decode().split("\n\n")[:-1]

    def text(self, prompt: str, new: int) -> str:
        """What generate() of the model adds to a prompt, with a cache of its own."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        cache = Cache(self.generator.model, self.generator.method)
        tokens = self.generator.model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
        text: str = self.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        return text


@contextlib.contextmanager
def running(model: torch.nn.Module, tokenizer: Any, name: str, method: str, **options: Any) -> Iterator[Running]:
    """Serve a model under a name until the `with` is left. The options are those of `build_application`."""
    import uvicorn

    generator = Generator(model, skimkv.parse(method), Conversations(4, 10**9))
    app = serve.build_application(generator, tokenizer, name, **options)
    opened = serve.listen("127.0.0.1", 0)
    try:
        from skimkv.serve.connections import web_server

        server = web_server(app)
    except ImportError:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    yield Running(generator, tokenizer, *opened.getsockname())
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
