"""The routes of the server: requests are read within limits and checked, answers are whole or streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import chat_completions, completions, metrics, requests, responses
from .aside import Aside
from .chats import chat_tokens, response_messages, used_tools
from .generation import Generator
from .guard import Guard
from .pieces import response_parser
from .requests import Refused, error_object
from .worker import Task, Worker

FORGOTTEN_BODIES = 32  # times --max-body: a body that is larger still is not even waited for
BODY_SECONDS = 60.0  # within which the whole body of a request must have come
LEAST_BODY = 2**20  # bytes that are always allowed
BYTES_A_TOKEN = 32  # of a body for each token of the longest prompt: texts have fewer

ENDING = error_object("the server is ending", "server_error")

Body = Mapping[str, Any]
T = TypeVar("T")


class Server:
    """What serves one model: it turns requests into tasks for the worker, and the pieces of answers into responses.

    name: of the model. max_body: bytes of the largest body; None follows from the longest prompt. parallel: how many
    answers are made together.
    """

    def __init__(self, generator: Generator, tokenizer: Any, name: str, max_body: int | None, parallel: int) -> None:
        self.generator, self.tokenizer, self.name = generator, tokenizer, name
        self.max_body = max_body or max(LEAST_BODY, BYTES_A_TOKEN * (generator.max_tokens or 2**20))
        self.worker, self.aside = Worker(generator, tokenizer, parallel), Aside()

    def completion_tasks(self, body: Body) -> list[Task]:
        """Return a task for each prompt of a completion."""
        tasks = []
        for prompt in requests.list_of_prompts(body["prompt"]):
            ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
            tasks.append(Task(self.generator.prompt(ids, body, body.get("max_tokens")), _stops(body)))
        return tasks

    def chat_tasks(self, body: Body) -> list[Task]:
        """Return the task of a chat."""
        new_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        return [self._chat_task(body["messages"], body, new_tokens, "messages")]

    def response_tasks(self, body: Body) -> list[Task]:
        """Return the task of a response."""
        return [self._chat_task(response_messages(body), body, body.get("max_output_tokens"), "input")]

    def _chat_task(self, messages: list[dict[str, Any]], body: Body, new_tokens: int | None, field: str) -> Task:
        ids, tools = chat_tokens(self.tokenizer, messages, body, field), used_tools(body)
        prompt = self.generator.prompt(ids, body, new_tokens)
        return Task(prompt, _stops(body), response_parser(self.tokenizer, self.generator.model, ids, tools))

    def answer(self, kind: Kind) -> Callable[[Request], Any]:
        """Return the function that answers requests of a kind."""

        async def endpoint(request: Request) -> Response:
            """Answer one request."""
            try:
                return await self._answer(kind, request)
            except asyncio.CancelledError:
                return JSONResponse(ENDING, 503)

        return endpoint

    async def _answer(self, kind: Kind, request: Request) -> Response:
        body = await self._read(request)
        requests.check_request(body, kind.checks, kind.needed)
        if body.get("model", self.name) != self.name:
            raise _unknown_model(body["model"], self.name)
        tasks = await _unless_gone(request, self.aside.run(lambda: kind.tasks(self, body)))
        form, gone = kind.form(self.name, body), threading.Event()
        if body.get("stream"):
            return _Events(form, self._events(form, tasks, gone), gone)
        try:
            return await _unless_gone(request, self._whole(form, tasks, gone))
        finally:
            gone.set()

    async def _whole(self, form: Any, tasks: Sequence[Task], gone: threading.Event) -> Response:
        async for index, piece in self.worker.answers(tasks, gone):
            for _ in form.add(index, piece):
                pass
        return JSONResponse(form.whole())

    async def _events(self, form: Any, tasks: Sequence[Task], gone: threading.Event) -> AsyncIterator[str]:
        try:
            for event in form.start():
                yield form.write(event)
            async for index, piece in self.worker.answers(tasks, gone):
                for event in form.add(index, piece):
                    yield form.write(event)
            for event in form.finish():
                yield form.write(event)
            yield form.last_words
        except Exception as error:  # the status has been sent, so the stream tells of it
            if not isinstance(error, ValueError):
                logging.getLogger("uvicorn.error").error("an answer failed", exc_info=error)
            for event in form.fail(_told(error)):
                yield form.write(event)

    async def _read(self, request: Request) -> dict[str, Any]:
        """Return the object in the body of a request. Raises Refused if it is too large, too slow or something else."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # which a page of another origin cannot send without being asked
            raise Refused("the header Content-Type must be application/json", status=415)
        try:
            body = await asyncio.wait_for(self._read_bytes(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(f"the body did not come within {BODY_SECONDS:g} seconds", status=408) from None
        return await self.aside.run(lambda: requests.read_object(body))

    async def _read_bytes(self, request: Request) -> bytes:
        said, most = request.headers.get("content-length", ""), FORGOTTEN_BODIES * self.max_body
        if said.isdecimal() and int(said) > most:
            raise self._too_large(int(said))
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            if size <= self.max_body:
                parts.append(part)
            else:  # the rest is read and forgotten, so that the client comes to read the answer
                parts.clear()
        if size > self.max_body:
            raise self._too_large(size)
        return b"".join(parts)

    def _too_large(self, size: int) -> Refused:
        return Refused(
            f"the body has {size} bytes, and at most {self.max_body} are read: send less, or start the server with "
            "a larger --max-body",
            code="request_too_large", status=413,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Run with the application; what is still generated afterwards is given up, and what waits is written."""
        yield
        await asyncio.to_thread(self.worker.end)
        if self.generator.folder is not None:
            await asyncio.to_thread(self.generator.folder.end)

    async def models(self, request: Request) -> Response:
        """Tell which models there are: one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Tell of the model with a name."""
        name = request.path_params["name"]
        if name != self.name:
            raise _unknown_model(name, self.name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "skimkv"}

    async def health(self, request: Request) -> Response:
        """Tell that the server answers."""
        return JSONResponse({"status": "ok"})

    async def totals(self, request: Request) -> Response:
        """Tell what was generated so far, and what is kept."""
        kept, folder = self.generator.conversations, self.generator.folder
        return JSONResponse({
            "model": self.name, "method": repr(self.generator.method), **vars(self.generator.totals),
            "conversations": len(kept), "conversation_bytes": kept.nbytes,
            "stored_conversations": folder.count if folder else 0, "stored_bytes": folder.nbytes if folder else 0,
        })  # fmt: skip

    async def metrics(self, request: Request) -> Response:
        """Tell what the server did and holds, as Prometheus reads it."""
        return Response(metrics.text(self.generator, self.worker), media_type=metrics.MEDIA_TYPE)

    def application(self, cors: Sequence[str], api_key: str | None) -> Starlette:
        """Make the ASGI application. See `skimkv.serve.build_application`."""
        routes = [Route(path, self.answer(kind), methods=["POST"]) for path, kind in KINDS.items()]
        routes += [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/skimkv", self.totals),
            Route("/metrics", self.metrics),
        ]
        sharing: dict[str, Any] = {
            "allow_origins": list(cors),
            "allow_methods": ["GET", "POST"],
            "allow_headers": ["*"],
        }
        return Starlette(
            routes=routes,
            lifespan=self.lifespan,
            middleware=[
                *([Middleware(CORSMiddleware, **sharing)] if cors else []),
                *([Middleware(Guard, key=api_key)] if api_key else []),
            ],
            exception_handlers={
                Refused: _tell, ValueError: _tell, HTTPException: _tell_http, ClientDisconnect: _nobody,
                Exception: _tell,
            },
        )  # fmt: skip


class Kind(NamedTuple):
    """A kind of request: its fields, the one that it needs, its tasks, and the form of the answer."""

    checks: Mapping[str, requests.Check]
    needed: str
    tasks: Callable[[Server, Body], list[Task]]
    form: Callable[[str, Body], Any]


KINDS = {
    "/v1/completions": Kind(requests.COMPLETION, "prompt", Server.completion_tasks, completions.Completion),
    "/v1/chat/completions": Kind(requests.CHAT, "messages", Server.chat_tasks, chat_completions.ChatCompletion),
    "/v1/responses": Kind(requests.RESPONSE, "input", Server.response_tasks, responses.Response),
}


class _Events(StreamingResponse):
    """A stream of events; when it ends in any way, `gone` is set."""

    def __init__(self, form: Any, events: AsyncIterator[str], gone: threading.Event) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.form, self.gone = form, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, until the server ends or the client has gone."""
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            told = "".join(map(self.form.write, self.form.fail(ENDING))).encode()
            await send({"type": "http.response.body", "body": told, "more_body": False})
        finally:
            self.gone.set()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns. Raises ClientDisconnect when the client closes its connection before."""

    async def wait_for_the_end() -> None:
        """Wait until the client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_the_end())
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        listening.cancel()


def _unknown_model(asked: str, name: str) -> Refused:
    return Refused(f"this server has the model {name!r} and no {asked!r}", "model", "model_not_found", 404)


def _stops(body: Body) -> list[str]:
    stops = body.get("stop", [])
    return [stops] if isinstance(stops, str) else stops


def _told(error: Exception) -> dict[str, Any]:
    """What a client is told of an error."""
    if isinstance(error, Refused):
        return error.error
    line = " ".join(str(error).split()) or type(error).__name__
    return error_object(line, "invalid_request_error" if isinstance(error, ValueError) else "server_error")


async def _tell(request: Request, error: Exception) -> Response:
    told = _told(error)
    status = error.status if isinstance(error, Refused) else 400 if isinstance(error, ValueError) else 500
    return JSONResponse(told, status)


async def _tell_http(request: Request, error: Exception) -> Response:
    """Tell of an address that does not exist, or of a method that it does not take."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return JSONResponse(error_object(message, "invalid_request_error"), error.status_code, error.headers)


async def _nobody(request: Request, error: Exception) -> Response:
    """Answer a client that has gone: nobody reads it."""
    return Response()
