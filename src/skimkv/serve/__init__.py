"""An OpenAI endpoint on one machine, with a method's cache for each request."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from .generation import Generator

PACKAGES = ("starlette", "uvicorn")
# Versions of transformers whose marks of reasoning and tools this package can read: from the first one up to, but not
# including, the second.
KNOWN_VERSIONS = (5, 20), (5, 24)


def check_installed() -> None:
    """Raise ValueError, in one line that says what to install, if the server cannot run here."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'skimkv[serve]'")
    version = importlib.metadata.version("transformers")
    low, high = KNOWN_VERSIONS
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        raise ValueError(_unknown_version(version))


def build_application(
    generator: Generator,
    tokenizer: Any,
    name: str,
    cors: Sequence[str] = (),
    max_body: int | None = None,
    parallel: int = 1,
    api_key: str | None = None,
) -> Starlette:
    """Make the ASGI application that serves a model under this name.

    It has OpenAI's routes for completions, chat completions, responses and models, /health, and /metrics and /skimkv,
    which tell what was generated and what is kept. cors: the origins whose pages may ask it. max_body: bytes of the
    largest body of a request; None follows from the longest prompt. parallel: how many answers are made together.
    api_key: what a request needs in its header Authorization, but for /health; None: nothing.

    Raises ValueError, in one line, if a package is missing or the version of transformers is not one that is known.
    """
    check_installed()
    try:
        from .application import Server
    except ImportError as error:
        raise ValueError(f"{_unknown_version(importlib.metadata.version('transformers'))} ({error})") from error
    return Server(generator, tokenizer, name, max_body, parallel).application(cors, api_key)


def reserve(host: str, port: int) -> socket.socket:
    """Take an address for the socket of a server; port 0 takes a free one. Clients are refused until it listens.

    Raises ValueError, in one line, if that is not possible.
    """
    if not host:
        raise ValueError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 to let other machines in")
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last server's connections may be open
        if opened.family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((host, port))
    except (OSError, OverflowError) as error:
        opened.close()
        raise _unusable(host, port, error) from None
    return opened


def listen(host: str, port: int, reserved: socket.socket | None = None) -> socket.socket:
    """Open the socket of a server. reserved: what `reserve` returned for this address; None: nothing was reserved.

    Raises ValueError, in one line, if that is not possible: another server may have begun to listen there meanwhile.
    """
    opened = reserve(host, port) if reserved is None else reserved
    try:
        opened.listen()
    except OSError as error:
        opened.close()
        raise _unusable(host, port, error) from None
    return opened


def _unusable(host: str, port: int, error: Exception) -> ValueError:
    return ValueError(f"cannot listen at {host}, port {port}: {error}; give another --host or --port")


def run(app: Starlette, opened: socket.socket, ending_seconds: int = 5) -> None:
    """Serve until Ctrl-C or a signal that ends the process, which leave answers `ending_seconds` to end."""
    from .connections import web_server

    web_server(app, ending_seconds).run(sockets=[opened])


def _unknown_version(version: str) -> str:
    low, high = ((".".join(map(str, part))) for part in KNOWN_VERSIONS)
    return (
        f"serving is tested with transformers {low} up to {high}, and this is {version}, whose server may differ: "
        f"pip install 'transformers>={low},<{high}'"
    )
