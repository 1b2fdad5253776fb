"""Notice that a client has gone, so that nothing more is generated for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_client_gone: ContextVar[threading.Event] = ContextVar("client_gone")


def client_gone() -> threading.Event:
    """Return the event that is set when the client of the current request has closed its connection."""
    return _client_gone.get(threading.Event())


class NoticesDisconnects:
    """An ASGI application around another one, whose handlers can ask for `client_gone()`.

    It reads the whole body of a request first, and listens to the connection afterwards.
    """

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        gone = threading.Event()
        _client_gone.set(gone)
        body: list[Message] = []
        while not body or body[-1].get("more_body", False):
            body.append(await receive())
            if body[-1]["type"] == "http.disconnect":
                return

        async def replay() -> Message:
            """Give the body once more, then what the connection says."""
            return body.pop(0) if body else await receive()

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        listener = asyncio.create_task(listen())
        try:
            await self.application(scope, replay, send)
        finally:
            listener.cancel()
