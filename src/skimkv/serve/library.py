"""The server of the transformers library, with our generation in the place of its own.

Requests, chat templates, tools, streams and answers are the library's; what it has no name for outside its own package
is used in this file only. Import it through `skimkv.serve.build_application`, which checks the versions first.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState

from .disconnect import Application, NoticesDisconnects, client_gone
from .generation import Generator
from .requests import check_request, require


class _OneModel(ModelManager):
    """Knows one model, which is loaded already and stays."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.pair = model, tokenizer
        super().__init__(device="cpu", force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name as it is: no revision is looked up."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, gguf_file: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the model and its tokenizer. Raises ValueError for any other model."""
        whole = model_id_and_revision if gguf_file is None else f"{model_id_and_revision}:{gguf_file}"
        if whole != self.force_model:
            raise ValueError(f"this server has the model {self.force_model!r} and no {whole!r}")
        return self.pair

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the list of models for clients: this one."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "skimkv"}]


class _Bound:
    """Stands for the model in the library's call of `generate`: what it generates belongs to one request."""

    def __init__(self, generator: Generator, gone: threading.Event) -> None:
        self.generator, self.gone = generator, gone

    def generate(self, **options: Any) -> Any:
        """Generate with the method, in the library's thread. An error in a stream has a text that fits into JSON."""
        try:
            return self.generator.generate(self.gone, **options)
        except Exception as error:
            if options.get("streamer") is None:
                raise
            raise RuntimeError(json.dumps(" ".join(str(error).split()))[1:-1]) from error


class _OneAfterAnother(GenerateManager):
    """Runs requests one after the other in one thread, each with a cache of the method."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        """Start a request and return the queue of its pieces of text, and its streamer."""
        bound = self._bind(inputs, gen_config)
        queue, streamer = super().generate_streaming(bound, processor, inputs, gen_config, request_id, response_parser)
        vars(streamer)["cancel"] = bound.gone.set  # the library's own raises inside generate(): the cache would be lost
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Run a request and return its text, the length of its prompt and its tokens."""
        bound = self._bind(inputs, gen_config)
        return await super().generate_non_streaming(bound, processor, inputs, gen_config, request_id)

    def _bind(self, inputs: Any, gen_config: Any) -> Any:
        """Check the length of a prompt. Raises HTTPException if it is too long."""
        try:
            self.generator.fit(inputs["input_ids"].shape[-1], gen_config)
        except ValueError as error:
            raise HTTPException(status_code=400, detail=str(error)) from None
        return _Bound(self.generator, client_gone())


class _OneManager(GenerationState):
    """Gives every request the same manager."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.manager = _OneAfterAnother(generator)

    def get_manager(self, model_id: str, use_cb: bool = False) -> _OneAfterAnother:
        """Return the manager."""
        return self.manager


class _Checked(BaseHandler):
    """A handler that checks the fields of a request, and keeps seed and temperature with the request."""

    needed: tuple[str, ...] = ()

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        require(body, *self.needed)
        check_request(body)

    def _build_generation_config(self, body: dict[str, Any], model_config: Any, use_cb: bool = False) -> Any:
        """The settings of a request. The library would seed at once, while another request may still sample."""
        config: Any = super()._build_generation_config({**body, "seed": None}, model_config, use_cb)
        config.seed = body.get("seed")
        if body.get("temperature"):
            config.do_sample = True  # also where the model's own settings do not sample
        return config


class _Chat(_Checked, ChatCompletionHandler):
    needed = ("messages",)


class _Completion(_Checked, CompletionHandler):
    needed = ("prompt",)


class _Response(_Checked, ResponseHandler):
    needed = ("input",)


def application(generator: Generator, tokenizer: Any, name: str) -> Application:
    """Make the ASGI application that serves a model under a name. See `skimkv.serve.build_application`."""
    models, state = _OneModel(name, generator.model, tokenizer), _OneManager(generator)
    app = build_server(
        models,
        _Chat(models, state),
        completion_handler=_Completion(models, state),
        response_handler=_Response(models, state),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(models, state),
        generation_state=state,
    )

    async def bad_request(request: Any, error: Exception) -> JSONResponse:
        """Answer a request that cannot be carried out with one line that says why."""
        return JSONResponse({"detail": " ".join(str(error).split())}, status_code=400)

    app.add_exception_handler(ValueError, bad_request)
    app.add_exception_handler(TemplateError, bad_request)  # a chat template refuses the messages

    async def totals() -> JSONResponse:
        """Answer with what was generated so far, and what is kept."""
        kept = generator.conversations
        return JSONResponse({
            "model": name, "method": repr(generator.method), **vars(generator.totals),
            "conversations": len(kept), "conversation_bytes": kept.nbytes,
        })  # fmt: skip

    app.add_api_route("/skimkv", totals, methods=["GET"])
    return NoticesDisconnects(app)
