"""How --help reads: a sentence, an example, and the options in groups under their rich_help_panel.

In a command's docstring a paragraph that is indented, such as the example, is printed as it stands.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .errors import Interrupted
from .options import OUTPUT_OPTIONS

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
NO_BREAK = "\N{NO-BREAK SPACE}"
LONGEST_NAME = 24  # the text of an option with a longer name begins on the next line
# What typer writes -> what we write: first the names of arguments and numbers, then the notes after a text.
NAMES = ((r"^(\w+) <path>$", r"\1"), (r" <?int(eger)?( range)?>?$", " N"), (r" <?float( range)?>?$", " X"))
NOTES = (
    (r"\\\[", "["),  # older versions escape it for rich, which writes nothing here
    (r"; x>=0(\.0)?\]$", "]"),
    (r"\bx>=([\d.]+)\]$", r"at least \1]"),
    (r"\[default: \((.*?)\)", r"[default: \1"),
)


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

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises Interrupted at Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, an argument without the braces that typer puts around it."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

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
            for line in paragraph.splitlines():
                formatter.write(_fold(line[2:], formatter.width) + "\n")
        else:
            formatter.write(textwrap.fill(paragraph, formatter.width, break_on_hyphens=False) + "\n")


def _fold(example: str, width: int) -> str:
    """Break a long command line before its options, so that it can still be copied to a shell."""
    first, *options = re.split(r" (?=--)", example)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 3 > width:  # room for a space before it, and for " \\" after it
            lines[-1] += " \\"
            lines.append(f"      {option}")
        else:
            lines[-1] += f" {option}"
    return "\n".join(lines)


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    output: list[tuple[str, str]] = []
    other: list[tuple[str, str]] = []
    for param in command.get_params(context):
        shown = param.get_help_record(context)
        if shown is None:
            continue
        name, text = shown
        for pattern, word in NAMES:
            name = re.sub(pattern, word, name, flags=re.IGNORECASE)
        for pattern, word in NOTES:
            text = re.sub(pattern, word, text)
        panel = getattr(param, "rich_help_panel", None)
        if {"--help", "--version"} & set(param.opts):
            other.append((name, text))
        elif panel == OUTPUT_OPTIONS:
            output.append((name, text))
        elif param.param_type_name == "argument":
            groups["Arguments"].append((name, text))
        else:
            groups.setdefault(panel or "Options", []).append((name, text))
    _write_groups({**groups, OUTPUT_OPTIONS: output, "Other options": other}, formatter)


def _write_groups(groups: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    """Write names on the left and texts on the right; the text of a long name begins on the next line."""
    for heading, records in groups.items():
        if not records:
            continue
        column = min(max(len(name) for name, _ in records), LONGEST_NAME) + 4
        with formatter.section(heading):
            for name, text in records:
                # what stays on one line: a note in brackets, a spec, and words with a hyphen (file names and flags)
                text = re.sub(r"\[[^]]*\]$|'\w+\([^']*\)'", lambda note: note[0].replace(" ", NO_BREAK), text)
                lines = textwrap.wrap(text, formatter.width - column, break_on_hyphens=False, break_long_words=False)
                lead = f"  {name}".ljust(column)
                if len(name) + 4 > column:
                    formatter.write(f"  {name}\n")
                    lead = " " * column
                written = "\n".join([lead + lines[0], *(" " * column + line for line in lines[1:])])
                formatter.write(written.replace(NO_BREAK, " ") + "\n")
