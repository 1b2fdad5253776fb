"""A key that requests must have."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .requests import error_object

OPEN = {"/health"}  # what whoever watches the server may ask without a key
REFUSED = error_object(
    "the header Authorization must be 'Bearer KEY' with the key that this server was started with",
    "invalid_request_error", code="invalid_api_key",
)  # fmt: skip


class Guard:
    """Refuses requests without the key, with status 401."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not secrets.compare_digest(key.strip().encode(), self.key):
                await JSONResponse(REFUSED, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)
