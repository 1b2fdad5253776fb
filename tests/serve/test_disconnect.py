"""A client that closes its connection is noticed, whether or not anybody else listens."""

from __future__ import annotations

import asyncio
from typing import Any

from skimkv.serve.disconnect import NoticesDisconnects, client_gone

BODY = [
    {"type": "http.request", "body": b"one ", "more_body": True},
    {"type": "http.request", "body": b"two", "more_body": False},
]


class Connection:
    """What a client does: its messages, and whether it closes the connection after them."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self.closed = list(messages), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await self.closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        raise AssertionError("nothing is sent in these tests")


def test_the_body_reaches_the_application_and_the_end_is_noticed() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        messages = [await receive(), await receive()]
        assert messages == BODY
        gone = client_gone()
        assert not gone.is_set()
        connection.closed.set()
        while not gone.is_set():
            await asyncio.sleep(0)
        assert (await receive())["type"] == "http.disconnect"
        seen.append("end")

    async def run() -> None:
        nonlocal connection
        connection = Connection(BODY)
        await NoticesDisconnects(application)({"type": "http"}, connection.receive, connection.send)

    seen: list[str] = []
    connection: Any = None
    asyncio.run(run())
    assert seen == ["end"]


def test_requests_do_not_share_their_events() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        events.append(client_gone())
        if scope["closes"]:
            scope["connection"].closed.set()
            while not events[-1].is_set():
                await asyncio.sleep(0)
        else:
            await stay.wait()
            assert not client_gone().is_set()

    async def request(closes: bool) -> None:
        connection = Connection(BODY)
        scope = {"type": "http", "closes": closes, "connection": connection}
        await NoticesDisconnects(application)(scope, connection.receive, connection.send)
        stay.set()

    async def run() -> None:
        nonlocal stay
        stay = asyncio.Event()
        await asyncio.gather(request(False), request(True))

    events: list[Any] = []
    stay: Any = None
    asyncio.run(run())
    assert [event.is_set() for event in events] == [False, True]


def test_a_client_that_leaves_before_its_body_is_whole() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append("application")

    async def run() -> None:
        connection = Connection(BODY[:1])
        connection.closed.set()
        await NoticesDisconnects(application)({"type": "http"}, connection.receive, connection.send)

    reached: list[str] = []
    asyncio.run(run())
    assert reached == []


def test_what_is_no_request_passes_through() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    reached: list[str] = []
    connection: Any = None
    asyncio.run(NoticesDisconnects(application)({"type": "lifespan"}, connection, connection))
    assert reached == ["lifespan"]
