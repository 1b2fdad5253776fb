"""Applications of typer whose --help has an example and groups of options, and which end in one line after Ctrl-C.

In a command's docstring a paragraph that is indented, such as the example, is printed as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .errors import Interrupted

CONTEXT = {"help_option_names": ["-h", "--help"]}


class App(typer.Typer):
    """A typer application; `rich_help_panel` is the group of a command or an option in its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=Group, context_settings=CONTEXT, add_completion=False, rich_markup_mode="markdown",
            pretty_exceptions_enable=False, **settings,
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a function as a command; settings are those of typer.Typer.command."""
        return super().command(name, cls=Command, context_settings=CONTEXT, **settings)


class _SaysInterrupted:
    """Of typer's classes: Ctrl-C in a command, or while its arguments are read, raises Interrupted."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments."""
        try:
            return super().make_context(*args, **kwargs)  # type: ignore[misc]
        except KeyboardInterrupt:
            raise Interrupted from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt:
            raise Interrupted from None


class Command(_SaysInterrupted, TyperCommand):
    """A command."""


class Group(_SaysInterrupted, TyperGroup):
    """Several commands."""
