"""The command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import carry_out

if TYPE_CHECKING:
    import typer


def main(argv: list[str] | None = None) -> int:
    """Run skimkv with these arguments, by default those of the process, and return the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return carry_out(_commands, "skimkv", argv)


def _commands() -> typer.Typer:
    from .app import app

    return app
