"""How --help reads: a sentence, an example, and the options in groups under their rich_help_panel.

In a command's docstring a paragraph that is indented, such as the example, is printed as it stands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
LAST = "Other options"
# typer's words for a number, a bound and a default in words -> ours
NAMES = ((r" <?int(eger)?( range)?>?$", " N"), (r" <?float( range)?>?$", " X"))
NOTES = ((r"\bx>=([\d.]+)\]$", r"at least \1]"), (r"\[default: \((.*?)\)", r"[default: \1"))


class App(typer.Typer):
    """A typer application whose commands have this help; `rich_help_panel` is the group of a command or an option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=Group, context_settings=CONTEXT, add_completion=False, rich_markup_mode=None,
            pretty_exceptions_enable=False, **settings,
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a function as a command; settings are those of typer.Typer.command."""
        return super().command(name, cls=Command, context_settings=CONTEXT, **settings)


class Command(TyperCommand):
    """A command whose help has an example and groups of options."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does, and its example."""
        _write_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in their groups."""
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help shows each command with its first sentence."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the group is for, and its example."""
        _write_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their groups, then the options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            groups.setdefault(command.rich_help_panel or "Commands", []).append((name, _paragraphs(command)[0]))
        _write_groups(groups, formatter)
        _write_options(self, ctx, formatter)


def _paragraphs(command: Any) -> list[str]:
    """The paragraphs of a command's docstring: each on one line, except those that are indented."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return [text if text.startswith("    ") else " ".join(text.split()) for text in paragraphs]


def _write_text(command: Any, formatter: Any) -> None:
    for paragraph in _paragraphs(command):
        formatter.write_paragraph()
        if paragraph.startswith("    "):
            formatter.write("".join(f"{line[2:]}\n" for line in paragraph.splitlines()))
        else:
            formatter.write_text(paragraph)


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    last: list[tuple[str, str]] = []
    for param in command.get_params(context):
        shown = param.get_help_record(context)
        if shown is None:
            continue
        name, text = shown
        for pattern, word in NAMES:
            name = re.sub(pattern, word, name, flags=re.IGNORECASE)
        for pattern, word in NOTES:
            text = re.sub(pattern, word, text)
        record = name, text
        if {"--help", "--version"} & set(param.opts):
            last.append(record)
        else:
            default = "Options" if param.param_type_name == "option" else "Arguments"
            groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
    _write_groups({**groups, LAST: last}, formatter)


def _write_groups(groups: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for heading, records in groups.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
