"""A server of `skimkv serve` in a thread of the tests' process, and requests to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import skimkv
from skimkv import serve
from skimkv.hf.cache import Cache
from skimkv.serve.conversations import Conversations
from skimkv.serve.folder import Folder
from skimkv.serve.generation import Answer, Generator, Prompt
from support.openai_requests import Endpoint


@dataclass(frozen=True)
class Running(Endpoint):
    """A server that runs, and what it serves."""

    generator: Generator
    tokenizer: Any

    @property
    def client(self) -> Any:
        """The official client."""
        import openai

        return openai.OpenAI(base_url=f"http://{self.host}:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def text(self, prompt: str, new: int) -> str:
        """What generate() of the model adds to a prompt, with a cache of its own."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        cache = Cache(self.generator.model, self.generator.method)
        tokens = self.generator.model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
        text: str = self.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        return text


@contextlib.contextmanager
def running(
    model: torch.nn.Module, tokenizer: Any, name: str, method: str, cache_dir: Path | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a model under a name until the `with` is left. The options are those of `build_application`."""
    from skimkv.serve.connections import web_server

    generator = Generator(model, skimkv.parse(method), Conversations(4, 10**9))
    if cache_dir is not None:
        generator.folder = Folder(cache_dir, 10**9, 10**9, model, generator.method, generator.max_tokens)
    app = serve.build_application(generator, tokenizer, name, **options)
    opened = serve.listen("127.0.0.1", 0)
    server = web_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    yield Running(*opened.getsockname(), generator, tokenizer)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def answer_alone(made: Generator, prompt: Prompt, cancelled: threading.Event | None = None, take: Any = None) -> Answer:
    """The answer to a prompt, as a worker makes it that has no other request."""
    cancelled, take = cancelled or threading.Event(), take or (lambda tokens: False)
    answer = None if cancelled.is_set() else made.begin(prompt, cancelled, take)
    if answer is None:
        return made.generate(prompt, cancelled, take)
    while answer.is_open:
        if answer.is_reading:
            answer.read()
        else:
            answer.choose(*made.step([answer]))
    return answer.end()
