"""The connections of the server, and how long they may be idle."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # within which the whole head of a request must have come


class LimitedProtocol(H11Protocol):
    """Closes a connection that has begun, and does not send the whole head of a request in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read more of a request."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def web_server(app: Starlette, ending_seconds: int = 5) -> uvicorn.Server:
    """Make the server of an application. ending_seconds: that answers on their way have when the server shall end."""
    config = uvicorn.Config(app, http=LimitedProtocol, log_level="warning", timeout_graceful_shutdown=ending_seconds)
    return uvicorn.Server(config)
